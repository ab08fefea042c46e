"""One run of the study of wires: a way to exchange gradients, a wire, with or without a slow
rank, a seed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.hosts import open_hosts


@dataclass(frozen=True, slots=True)
class Method:
    """A way to keep the ranks' models together, and what its SGD takes: momentum, and factors of
    the study's settings.

    ``distribute`` holds arguments of `lightning_ring.distribute`, nodes of Hydra among them. `None`
    is torch's own DistributedDataParallel over Gloo. With ``own_pace`` a slow rank takes fewer of
    the ranks' steps than the others. ``whole_steps``: how many steps' gradients, whole, a warm-up
    sends in all.
    """

    label: str
    distribute: dict[str, Any] | None
    momentum: float = 0.9
    lr_factor: float = 1.0
    weight_decay_factor: float = 1.0
    own_pace: bool = False
    whole_steps: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a study share.

    Attributes:
        hosts, ranks: One rank a host if both are equal; the ranks share this machine's cores.
        images: Of the training set.
        batch_size: Of each rank.
        hidden: Width of the two hidden layers. It sets how many bytes a step sends.
        eval_every: Steps between two evaluations, whose time does not count.
        seconds: A run is ended when its training has taken so long.
    """

    hosts: int
    ranks: int
    images: int
    batch_size: int
    hidden: int
    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    eval_every: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """What sets one run apart. ``rate`` of the wire as tc writes it; a ``straggler`` takes twice as
    long a batch.

    Without ``method`` nothing is trained: a profile is measured, for predictions of the others on
    that wire.
    """

    method: Method | None
    rate: str
    straggler: bool
    seed: int

    def key(self, settings: Settings) -> str:
        """Equal for runs that would do the same, whatever they are called."""
        method = self.method
        how = None
        if method is not None:
            trained = [method.momentum, method.lr_factor, method.weight_decay_factor]
            how = [method.distribute, *trained, method.own_pace]
        text = json.dumps(
            [asdict(settings), how, self.rate, self.straggler, self.seed],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def bits_per_second(rate: str) -> float:
    """Of a ``rate`` as tc writes it, "1.5gbit"."""
    found = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate.lower())
    assert found is not None, f"{rate!r} is no rate of a wire, such as 100mbit"
    return float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")


def execute(run: Run, settings: Settings) -> dict[str, Any]:
    """Train on hosts of this machine's own network. Returns a line of the record.

    Raises:
        RuntimeError: There can be no such hosts here, or the ranks failed.
    """
    started = time.perf_counter()
    label = run.method.label if run.method is not None else "the profile"
    with tempfile.TemporaryDirectory() as folder, open_hosts(settings.hosts, run.rate) as hosts:
        order, result = Path(folder, "order.json"), Path(folder, "result.json")
        address = hosts.address(hosts.names[0])
        given = asdict(run) | {"address": address}
        order.write_text(json.dumps(given | {"settings": asdict(settings), "result": str(result)}))
        command = hosts.mpirun(
            settings.ranks, sys.executable, "-m", "benchmarks.wires.rank", str(order)
        )
        limit = 4 * settings.seconds + 120
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if done.returncode or not result.exists():
            raise RuntimeError(
                f"{label} at {run.rate} failed:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        found = json.loads(result.read_text())
    about = {
        "key": run.key(settings),
        "method": label,
        "rate": run.rate,
        "straggler": run.straggler,
    }
    return about | {"seed": run.seed} | found | {"seconds": round(time.perf_counter() - started, 1)}
