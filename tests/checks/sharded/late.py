"""Parameters that arrive late: a strategy whose all-gathers are over only when somebody waits
for them.
"""

import time

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_ring import RingStrategy
from tests.checks.models import Classifier, fit, loader
from tests.checks.sharded.references import CAP
from tests.strategies import ring


class LateWork:
    def __init__(self, work, buffer, flat):
        self._work, self._buffer, self._flat = work, buffer, flat

    def wait(self):
        self._work.wait()
        time.sleep(0.005)
        self._flat.copy_(self._buffer)

    def done(self):
        return False


class Late:
    """A communicator whose all-gathers do not arrive before somebody waits for them."""

    def __init__(self, comm):
        self._comm = comm
        self.gathered = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_gather_(self, flat, *, name=""):
        self.gathered.append(name)
        buffer = flat.clone()
        return LateWork(self._comm.all_gather_(buffer, name=name), buffer, flat)


class LateRing(RingStrategy):
    def setup_distributed(self):
        super().setup_distributed()
        self._job.communicator = self.late = Late(self._job.communicator)

    def teardown(self):
        super().teardown()
        self._job.communicator = self.late._comm


class Tied(Classifier):
    """Reads parameters in every way that is not a plain call of the module they belong to."""

    def __init__(self):
        super().__init__(lr=0.3)
        self.net = nn.Linear(8, 4)
        self.table = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 6)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.lstm = nn.LSTM(8, 8)

    def loss(self, batch):
        # the embedding is used before, and without, its forward
        x = F.linear(batch[0], self.table.weight)
        x = self.head.forward(F.embedding(x.argmax(1), self.table.weight) * self.scale)
        x = self.lstm(F.linear(x, self.table.weight.t())[None])[0][0]
        logits = self.net(x)
        # by now every parameter was waited for
        penalty = sum(p.square().sum() for p in reversed(list(self.parameters())))
        return F.cross_entropy(logits, batch[1]) + 0.01 * penalty


class Patient(LateRing):
    """Waits after each step."""

    def on_train_start(self):
        super().on_train_start()
        self.algorithm.overlaps = False


class Noting(Callback):
    """Reads parameters in hooks between two steps."""

    def __init__(self):
        self.sums = []

    def on_train_batch_start(self, trainer, module, *_):
        self.sums += [p.detach().double().sum() for p in module.parameters()]

    def on_train_batch_end(self, trainer, module, *_):
        self.sums += [p.detach().double().sum() for p in list(module.parameters())[-1:]]


def run_late(module, callbacks=None, kind=LateRing):
    strategy = ring(True, kind, bucket_cap_mb=CAP)
    fit(strategy, module, loader(24), callbacks=callbacks, max_epochs=1)
    return strategy
