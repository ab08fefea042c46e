"""What scripts for DDP use: optimizers that are no torch `Optimizer`, ``trainer.model.no_sync``."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

from tests.checks.marks import by_world_size
from tests.checks.models import Classifier, fit
from tests.checks.strategy.references import assert_like_ddp, both
from tests.process_state import changed, process_state


class _OwnSGD:
    """Lightning's protocol `Optimizable`: no hooks, no class of torch."""

    def __init__(self, params: Iterable[Parameter], lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Any, Any] = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _WithOwnSGD(Classifier):
    def configure_optimizers(self) -> Any:
        return _OwnSGD(self.parameters(), 0.1)


class _WithItsOwnNoSync(Classifier):
    def no_sync(self) -> str:
        return "mine"

    def on_train_start(self) -> None:
        assert self.trainer.model.no_sync() == "mine"


@by_world_size
def check_optimizer_that_is_no_torch_optimizer_equals_ddp() -> None:
    assert_like_ddp(*both(_WithOwnSGD, max_epochs=1))


def check_no_sync_is_no_part_of_the_module() -> None:
    class Copying(Classifier):
        def on_train_start(self) -> None:
            assert "no_sync" not in self.state_dict()
            plain = copy.copy(self.net)
            assert "lightning_ring" not in repr(pickle.dumps(vars(self)["no_sync"]))
            with copy.deepcopy(vars(self)["no_sync"])():
                pass
            assert plain is not None

    module = Copying()
    fit("ring", module, max_epochs=1)
    assert "no_sync" not in vars(module)
    fit("ring", _WithItsOwnNoSync(), max_epochs=1)


def check_a_further_fit_leaves_the_process_as_it_was() -> None:
    fit("ring", Classifier(), max_epochs=1)
    before = process_state()
    for _ in range(2):
        fit("ring", Classifier(), max_epochs=1)
    after = process_state()
    difference = changed(before, after)
    if "files" in difference and len(after["files"]) <= len(before["files"]):
        del difference["files"]  # some may be closed late
    assert not difference, difference
