"""Memory that is freed comes back without page faults, and goes back to the system when it is
told to.
"""

import ctypes
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ring import RingStrategy
from lightning_ring.integrations.lightning import strategy
from tests.processes import clean_env

needs_glibc = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")),
    reason="mallopt's thresholds are glibc's",
)

# three blocks that are freed together are more than the 2 x 20 MB that glibc keeps by itself
_SCRIPT = """
import json, resource, sys
from pathlib import Path
from lightning_ring.host.malloc import keep_freed_memory, return_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(20_000_000) for _ in range(3)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

def third_step():
    return [faults_of_a_step() for _ in range(3)][-1]

found = {"glibc": third_step(), "kept": keep_freed_memory(), "keeping": third_step(), "held": resident_pages()}
return_freed_memory()
print(json.dumps(found | {"returned": resident_pages()}))
"""


def _run(**variables):
    own = ("MALLOC_", "GLIBC_")
    environ = {name: value for name, value in clean_env().items() if not name.startswith(own)}
    output = {"capture_output": True, "text": True, "timeout": 240, "check": True}
    command = [sys.executable, "-c", _SCRIPT]
    return json.loads(subprocess.run(command, env={**environ, **variables}, **output).stdout)


@needs_glibc
def test_freed_memory_is_used_again_without_page_faults_and_returned_at_the_end():
    found = _run()
    pages = 60_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert found["glibc"] > pages / 2, "glibc keeps it by itself: this test shows nothing"
    assert found["kept"]
    assert found["keeping"] < pages / 50
    assert found["held"] - found["returned"] > pages / 2


@needs_glibc
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TOP_PAD_": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"},
    ],
)
def test_what_the_user_told_glibc_holds(variables):
    found = _run(**variables)
    assert not found["kept"]
    assert found["keeping"] > 0.9 * found["glibc"] > 0


@pytest.mark.parametrize(("keeps", "fails"), [(True, False), (True, True), (False, False)])
def test_a_fit_keeps_it_from_its_first_step_to_its_end(keeps, fails, monkeypatch):
    said = []

    class Steps(BoringModel):
        def training_step(self, batch, batch_idx):
            said.append("step")
            if fails:
                raise ValueError("a step that fails")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(strategy, "keep_freed_memory", lambda: said.append("keep") or True)
    monkeypatch.setattr(strategy, "return_freed_memory", lambda: said.append("return"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy=RingStrategy(keep_freed_memory=keeps),
        accelerator="cpu",
        devices=1,
        fast_dev_run=1,
        **quiet,
    )
    with pytest.raises(ValueError, match="fails") if fails else nullcontext():
        trainer.fit(Steps())
    assert said == (["keep", "step", "return"] if keeps else ["step"])
