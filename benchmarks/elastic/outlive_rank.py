"""A rank of `benchmarks/elastic/outlive.py`: ``python -m benchmarks.elastic.outlive_rank LOOP
FOLDER --mib 256``.

Each loop trains the same layers as its library's documentation tells a user to. The imports stand
in the loops: the Pythons that have torchft and Horovod need not have the others.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.turns import parser_of

WIDTH, BATCH = 1024, 8  # of layers of 4 MiB; samples of a rank
DEADLY, STEPS = 13, 18  # the step in which a rank is killed; all steps
SAVE_EVERY = 5  # steps, where a restart needs a checkpoint: two finished steps are younger than it


class Watch:
    """Writes when this process finished which step, by the host's clock."""

    def __init__(self, folder):
        self._folder = folder

    def finished(self, step):
        with (self._folder / f"{os.getpid()}.steps").open("a") as log:
            log.write(json.dumps([step, time.monotonic()]) + "\n")

    def backward_of(self, step, *, victim):
        """Between forward and backward of ``step``: the victim is killed there, once in the job."""
        died = self._folder / "died"
        if victim and step == DEADLY and not died.exists():
            died.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def layers(mib):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(mib / 4))))
    )


def loss_of(module, batch):
    loss = module(batch).square().mean()
    return loss


def ring_elastic(watch, asked):
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ring import ElasticStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = layers(asked.mib)

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, batch[0])
            watch.backward_of(self.global_step + 1, victim=os.environ["RING_MEMBER"] == "1")
            return loss

        def on_train_batch_end(self, *_):
            watch.finished(self.global_step)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = pl.Trainer(
        strategy=ElasticStrategy(backend=asked.backend),
        accelerator="cpu",
        max_steps=asked.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(asked.steps * asked.ranks * BATCH, WIDTH))
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH))


def torchelastic(watch, asked):
    dist.init_process_group("gloo")
    net = layers(asked.mib)
    step, saved = 0, asked.folder / "checkpoint.pt"
    if saved.exists():
        checkpoint = torch.load(saved, mmap=True)
        net.load_state_dict(checkpoint["model"])
        step = checkpoint["step"]
    module = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    while step < asked.steps:
        optimizer.zero_grad()
        loss = loss_of(module, torch.randn(BATCH, WIDTH))
        watch.backward_of(step + 1, victim=dist.get_rank() == 1)
        loss.backward()
        optimizer.step()
        step += 1
        watch.finished(step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": net.state_dict(), "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    dist.destroy_process_group()


def torchft(watch, asked):
    """A replica group for each rank; all of the library's time limits are its defaults.

    Gradients are averaged by the manager, not by the library's DistributedDataParallel: version 0.2
    ends every survivor of a death in backward (https://github.com/meta-pytorch/torchft/pull/294).
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    net = layers(asked.mib)
    inner = torch.optim.SGD(net.parameters(), lr=1e-6)

    def load_state_dict(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"group{asked.number}",
        hostname="localhost",
    )
    optimizer = Optimizer(manager, inner)
    (asked.folder / f"{asked.number}.started").touch()
    # else the first one begins alone
    while len(list(asked.folder.glob("*.started"))) < asked.ranks:
        time.sleep(0.05)
    while (step := manager.current_step()) < asked.steps:
        optimizer.zero_grad()
        loss = loss_of(net, torch.randn(BATCH, WIDTH))
        watch.backward_of(step + 1, victim=asked.number == 1)
        loss.backward()
        for work in [manager.allreduce(param.grad) for param in net.parameters()]:
            work.wait()
        optimizer.step()
        # else the step's averages were not complete, and it was left out
        if manager.current_step() > step:
            watch.finished(manager.current_step())
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would wait for the last one's time limit


def horovod(watch, asked):
    import horovod.torch as hvd  # type: ignore[import-not-found]

    hvd.init()
    net = layers(asked.mib)
    inner = torch.optim.SGD(net.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters())

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state):
        while state.step < asked.steps:
            optimizer.zero_grad()
            loss = loss_of(net, torch.randn(BATCH, WIDTH))
            watch.backward_of(state.step + 1, victim=hvd.rank() == 1)
            loss.backward()
            optimizer.step()
            state.step += 1
            watch.finished(state.step)
            state.commit()

    train(hvd.elastic.TorchState(net, optimizer, step=0))


LOOPS = {
    "ring_elastic": ring_elastic,
    "torchelastic": torchelastic,
    "torchft": torchft,
    "horovod": horovod,
}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=float, required=True, help="of gradients")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--backend", default="auto", help="of ring_elastic")
    parser.add_argument("--number", type=int, help="of torchft's replica group")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    LOOPS[asked.loop](Watch(asked.folder), asked)


if __name__ == "__main__":
    main()
