"""What Lightning prints at a job's start: once, and no deprecation warning of one library to
another.
"""

import pytest

from tests import forked
from tests.processes import run

SCRIPT = """
import warnings

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_ring


class Model(BoringModel):
    def on_train_start(self):
        warnings.warn("from the user", FutureWarning)
        for text in ("from a library", "asked for"):
            warnings.warn_explicit(text, FutureWarning, "x.py", 1, module="lightning.pytorch.x")


if __name__ == "__main__":
    trainer = L.Trainer(strategy="ring", devices=2, accelerator="cpu", max_steps=1, logger=False,
                        enable_checkpointing=False, limit_val_batches=0)
    trainer.fit(Model())
    raise ValueError("after the fit")
"""


@pytest.mark.ranks
def test_messages_come_once_and_an_error_ends_in_its_cause(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["-W", "default:asked for:FutureWarning"]
    result = run([*forked.python(), *words, str(script)], **forked.ranks())
    assert result.returncode == 1
    assert result.stdout.count("GPU available") == 1
    assert "from a library" not in result.stdout
    for text in ("from the user", "asked for"):
        assert text in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last in {
        f"lightning_ring: rank {rank} failed: ValueError: after the fit" for rank in range(2)
    }
