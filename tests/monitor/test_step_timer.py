"""`StepTimer` in real Trainers, with a clock that tells how long each phase was made to take."""

import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring.monitor import StepTimer
from tests.trainers import quiet_trainer

PHASES = {"data": 0.010, "forward": 0.020, "backward": 0.030, "optimizer": 0.040}


class Clock:
    """Real waiting would be at the mercy of the machine: this clock only moves when a phase says
    so.
    """

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Sleepy(TensorDataset):
    clock: Clock

    def __getitem__(self, index):
        self.clock.now += PHASES["data"]
        return super().__getitem__(index)


class Model(L.LightningModule):
    def __init__(self, clock, manual):
        super().__init__()
        self.net, self.clock = torch.nn.Linear(2, 1), clock
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        self.clock.now += PHASES["forward"]
        loss = self.net(batch[0]).mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_after_backward(self):
        self.clock.now += PHASES["backward"]

    def validation_step(self, batch, batch_idx):
        self.clock.now += 100

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.move)
        return optimizer

    def move(self, *_):
        self.clock.now += PHASES["optimizer"]


class Attach(L.Callback):
    def __init__(self, clock):
        self.clock = clock
        self.timer: StepTimer
        self.interruptions = []
        self.steps = []

    def on_step(self, record):
        self.steps.append(record.times())

    def ignore(self, record):
        """Another user of the same timer."""

    def setup(self, trainer, pl_module, stage):
        self.timer = StepTimer.attach(trainer, self.on_step)
        self.timer._clock = self.clock
        assert StepTimer.attach(trainer, self.ignore) is self.timer  # shared by two
        self.timer.interruption_listeners.append(lambda *what: self.interruptions.append(what))


def timed(manual=False, **arguments):
    clock = Clock()
    Sleepy.clock = clock
    attach = Attach(clock)
    trainer = quiet_trainer(max_epochs=2, callbacks=[attach], **arguments)
    loader = DataLoader(Sleepy(torch.randn(6, 2)), batch_size=None, num_workers=0)
    trainer.fit(Model(clock, manual), loader, DataLoader(TensorDataset(torch.zeros(1, 2))))
    return attach, trainer


@pytest.mark.parametrize("manual", [False, True])
def test_every_phase_of_every_step_is_timed_and_validation_apart(manual):
    attach, _ = timed(manual)
    assert len(attach.steps) == 12
    for step in attach.steps:
        for phase, seconds in PHASES.items():
            assert getattr(step, phase) == pytest.approx(seconds)
        assert step.total == pytest.approx(sum(PHASES.values()))
        assert step.other == pytest.approx(0, abs=1e-9)
    whats, begins, ends = zip(*attach.interruptions, strict=True)
    assert whats == ("validation batch",) * 3  # of the sanity check and of two epochs
    assert all(end - begin == pytest.approx(100) for begin, end in zip(begins, ends, strict=True))


def test_accumulation_has_steps_without_optimizer():
    steps = timed(accumulate_grad_batches=2)[0].steps
    assert [round(step.optimizer, 3) for step in steps[:4]] == [0.0, 0.04, 0.0, 0.04]
    assert all(step.backward == pytest.approx(PHASES["backward"]) for step in steps)


def test_the_trainers_own_profiler_goes_on():
    profiler = SimpleProfiler()
    attach, trainer = timed(profiler=profiler)
    timer = attach.timer
    assert len(profiler.recorded_durations["run_training_batch"]) == 12
    timer.detach(trainer, attach.ignore)
    assert trainer.profiler is timer, "the other one still uses it"
    timer.detach(trainer, attach.on_step)
    assert not timer.listeners
    assert trainer.profiler is profiler


def test_it_can_be_copied():
    timer = StepTimer(SimpleProfiler(), torch.device("cpu"))
    for again in (copy.copy(timer), copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
        assert again.recorded_durations == {}, "the inner profiler's"
