"""One rank of a job: runs one program after the other, as it is told, and returns the numbers
that each ended with.
"""

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import time
import traceback
from pathlib import Path

import torch

EPOCHS = 2
OF_A_CHECKPOINT = ("optimizer_states", "lr_schedulers", "global_step", "epoch")


def follow_orders(orders, strategy, env, output, limit):
    """The main function of a rank. It ends with `None`, or with the process that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    os.environ.update(env)
    torch.set_num_threads(1)
    while (order := orders.recv()) is not None:
        faulthandler.dump_traceback_later(limit, exit=False)
        begin = time.process_time()
        try:
            result = run(strategy, order)
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            result = {"error": str(error), "kinds": kinds, "traceback": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        result["cpu_seconds"] = time.process_time() - begin
        orders.send_bytes(pickle.dumps(result))
    os._exit(0)


def run(strategy, order):
    random.seed(0)
    torch.manual_seed(0)
    names = {"__name__": "fuzzed", "__file__": order.script}
    exec(compile(Path(order.script).read_text(), order.script, "exec"), names)
    model, trainer = names["fit"](strategy, epochs=1 if order.save else EPOCHS, resume=order.load)
    path = order.save or f"{order.folder}/{strategy}.ckpt"
    trainer.save_checkpoint(path)  # on all ranks
    getattr(trainer, "close", lambda: None)()
    checkpoint = torch.load(path, weights_only=False) if trainer.is_global_zero else {}
    return {
        "weights": _numbers({name: p.detach() for name, p in model.named_parameters()}),
        "buffers": _numbers(dict(model.named_buffers())),
        "state": _numbers(
            {name: checkpoint[name] for name in OF_A_CHECKPOINT if name in checkpoint}
        ),
        "metrics": _numbers(dict(trainer.callback_metrics)),
        "seen": _numbers({"seen": model.seen}),
        "gradients": _numbers({"seen": model.gradients}),
    }


def _numbers(tree, path=""):
    """Every number in nested dicts, lists and tensors as ``path -> NumPy array``; what is no
    number by its text.
    """
    if isinstance(tree, dict):
        return {
            name: value
            for key, child in tree.items()
            for name, value in _numbers(child, f"{path}.{key}").items()
        }
    if isinstance(tree, (list, tuple)):
        return _numbers(dict(enumerate(tree)), path)
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach().to_dense()
        return {
            path: (torch.view_as_real(tensor) if tensor.is_complex() else tensor)
            .double()
            .numpy()
            .copy()
        }
    if isinstance(tree, (int, float)):
        return {path: torch.tensor(float(tree), dtype=torch.float64).numpy()}
    return {path: repr(tree)}
