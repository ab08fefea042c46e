"""The same death under `ring_elastic`, torchelastic and torchft: how long until another step is finished.

    python benchmarks/outlive.py ring torchrun torchft --ranks 3 --mib 16 --jobs 3

Ranks on this host train the same layers with SGD over Gloo; one kills itself in the forward of step 11. Shown are the
seconds from then to the end of a step, on any other rank, that had not been finished before, and the finished steps
that were done again. ``ring`` is a Trainer's fit with elastic=True. ``torchrun`` restarts all processes
(``--max-restarts``); the loop saves a checkpoint every 5 steps, which takes no part in the times. ``torchft`` (pip
install torchft, 0.2) runs one replica group a rank, with its lighthouse and its DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, DEADLY, STEPS, SAVE_EVERY = 1024, 11, 30, 5  # of layers of 4 MiB; steps
LIMIT = 200.0  # seconds of a job


class Log:
    """Finished steps of this process, with the host's clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def finished(self, step: int) -> None:
        with (self._folder / f"{os.getpid()}.steps").open("a") as file:
            file.write(json.dumps([step, time.time()]) + "\n")

    def die_once(self, step: int, victim: bool) -> None:
        """In step ``step``, which has begun."""
        died = self._folder / "died"
        if victim and step == DEADLY and not died.exists():
            died.write_text(str(time.time()))
            os.kill(os.getpid(), 9)


def model(mib: float) -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(mib / 4)))))


def loss_of(module: nn.Module) -> Tensor:
    loss: Tensor = module(torch.randn(8, WIDTH)).square().mean()
    return loss


def ring(log: Log, mib: float) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ring import RingStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(mib)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            log.die_once(self.global_step + 1, os.environ["RING_MEMBER"] == "1")
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            log.finished(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = pl.Trainer(
        strategy=RingStrategy(elastic=True, backend="gloo"),
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(STEPS * 40, WIDTH)), batch_size=8))


def torchrun(log: Log, mib: float, folder: Path) -> None:
    dist.init_process_group("gloo")
    net = model(mib)
    step, path = 0, folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["model"])
        step = saved["step"]
    module = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    while step < STEPS:
        log.die_once(step + 1, dist.get_rank() == 1)
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step()
        step += 1
        log.finished(step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": net.state_dict(), "step": step}, folder / "new.pt")
            os.replace(folder / "new.pt", path)


def torchft(log: Log, mib: float, number: int) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    net = model(mib)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"r{number}",
        hostname="localhost",
    )
    module = DistributedDataParallel(manager, net)
    wrapped = Optimizer(manager, optimizer)
    while manager.current_step() < STEPS:
        log.die_once(manager.current_step() + 1, number == 1)
        before = manager.current_step()
        wrapped.zero_grad()
        loss_of(module).backward()
        wrapped.step()
        if manager.current_step() > before:
            log.finished(manager.current_step())
    manager.shutdown(wait=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start(command: list[str], quiet: dict[str, Any]) -> None:
    """Run ``command`` to its end, for `LIMIT` at most; no process of it is left."""
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        process.wait(LIMIT)
    finally:
        for other in (*Path("/proc").glob("[0-9]*"),):
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(other.name)) == process.pid:
                    os.kill(int(other.name), 9)


def run(kind: str, ranks: int, mib: float, folder: Path) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    rank = [sys.executable, __file__, kind, "--mib", str(mib), "--folder", str(folder)]
    quiet: dict[str, Any] = {"env": environ, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if kind == "ring":
        job = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", str(ranks), "--min-ranks", "1", "--", *rank]
        start(job, quiet)
    elif kind == "torchrun":
        options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", "--monitor-interval=0.1"]
        start([sys.executable, "-m", "torch.distributed.run", *options, *rank[1:]], quiet)
    else:
        port = free_port()
        lighthouse = Path(sys.executable).with_name("torchft_lighthouse")
        limits = ["--min_replicas", "1", "--join_timeout_ms", "5000", "--bind", f"[::]:{port}"]
        server = subprocess.Popen([str(lighthouse), *limits], **quiet)
        environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        processes = [subprocess.Popen([*rank, "--number", str(number)], **quiet) for number in range(ranks)]
        try:
            for process in processes:
                process.wait(LIMIT)
        finally:
            for process in (*processes, server):
                process.kill()
                process.wait()


def measure(folder: Path) -> tuple[float, int]:
    """Seconds without a new step after the death, and finished steps that were done again."""
    died = float((folder / "died").read_text())
    steps = [json.loads(line) for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
    most = max(step for step, when in steps if when <= died)
    new = min(when for step, when in steps if step > most and when > died)
    again = {step for step, when in steps if when > died and step <= most}
    finished_before = {step for step, when in steps if when <= died and step < most}  # ranks end a step one by one
    return new - died, len(again & finished_before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=("ring", "torchrun", "torchft"))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mib", type=float, default=16.0, help="of gradients")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        log, kind = Log(options.folder), options.kinds[0]
        if kind == "ring":
            ring(log, options.mib)
        elif kind == "torchrun":
            torchrun(log, options.mib, options.folder)
        else:
            torchft(log, options.mib, options.number)
        return
    for kind in options.kinds:
        found = []
        for _ in range(options.jobs):
            with tempfile.TemporaryDirectory() as name:
                run(kind, options.ranks, options.mib, Path(name))
                found.append(measure(Path(name)))
        seconds = sorted(one for one, _ in found)
        shown = ", ".join(f"{one:.2f}" for one in seconds)
        again = statistics.median(again for _, again in found)
        print(f"{kind}: {statistics.median(seconds):.2f} s ({shown}), {again:g} steps done again", flush=True)


if __name__ == "__main__":
    main()
