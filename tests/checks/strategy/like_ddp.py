"""What scripts for DDP use: optimizers that are no torch `Optimizer`, ``trainer.model.no_sync``."""

import copy
import pickle
from collections import defaultdict

import torch

from tests.checks.marks import by_world_size
from tests.checks.models import Classifier, fit
from tests.checks.strategy.references import assert_like_ddp, both
from tests.process_state import changed, process_state


class _OwnSGD:
    """Lightning's protocol `Optimizable`: no hooks, no class of torch."""

    def __init__(self, params, lr):
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.defaults = {}
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none=True):
        for param in self.param_groups[0]["params"]:
            param.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class _WithOwnSGD(Classifier):
    def configure_optimizers(self):
        return _OwnSGD(self.parameters(), 0.1)


class _WithItsOwnNoSync(Classifier):
    def no_sync(self):
        return "mine"

    def on_train_start(self):
        assert self.trainer.model.no_sync() == "mine"


@by_world_size
def check_optimizer_that_is_no_torch_optimizer_equals_ddp():
    assert_like_ddp(*both(_WithOwnSGD, max_epochs=1))


def check_no_sync_is_no_part_of_the_module():
    class Copying(Classifier):
        def on_train_start(self):
            assert "no_sync" not in self.state_dict()
            copy.copy(self.net)
            assert "lightning_ring" not in repr(pickle.dumps(vars(self)["no_sync"]))
            with copy.deepcopy(vars(self)["no_sync"])():
                pass

    module = Copying()
    fit("ring", module, max_epochs=1)
    assert "no_sync" not in vars(module)
    fit("ring", _WithItsOwnNoSync(), max_epochs=1)


def check_a_further_fit_leaves_the_process_as_it_was():
    fit("ring", Classifier(), max_epochs=1)
    before = process_state()
    for _ in range(2):
        fit("ring", Classifier(), max_epochs=1)
    after = process_state()
    difference = changed(before, after)
    if "files" in difference and len(after["files"]) <= len(before["files"]):
        del difference["files"]  # some may be closed late
    assert not difference, difference
