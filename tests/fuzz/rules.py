"""Which features of a random program go together: `settle` takes out what has no meaning beside the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.program import Program

_BY_GRAD = ("adversarial example by autograd.grad", "gradient penalty", "torch.func.grad")
_FUNCTIONAL = ("Linear()", "Norm()", "Twice()", "Method()", "Large()")
_LOCAL = ("on rank 0", "some ranks")


def settle(program: Program) -> None:
    """Change ``program`` in place; twice is as once."""
    choices, hooks = program.choices, program.hooks

    def plain(*axes: str) -> None:
        for axis in axes:
            choices.pop(axis, None)

    def without(*names: str) -> None:
        hooks[:] = [hook for hook in hooks if not any(name in hook for name in names)]

    if program.choice("compression") != "none":  # 64-bit gradients are not compressed
        choices["precision"], choices["optimizer"] = "32-true", "SGD"
    _settle_blocks(program)
    if program.choice("training") != "automatic":
        plain("accumulate", "skip", "uneven", "average")
        without("every third step", "gradients are zeros")
        if program.choice("clip") == "overridden":
            plain("clip")
        if program.choice("schedule") == "on a plateau":
            plain("schedule")
        if program.choice("optimizer") == "LBFGS":
            plain("optimizer")
        if "two optimizers" in program.choice("training"):
            if len(program.blocks) < 2:
                program.blocks.append("Linear()")
            program.blocks[:] = ["Linear()" if block == "Dropped()" else block for block in program.blocks]
            plain("freeze")
    if "by reference" in program.choice("training") and any(word in program.choice("extra") for word in _LOCAL):
        plain("extra")  # a rank that adds to a gradient it keeps changes it for itself
    if program.choice("extra") == "backward between two steps on rank 0" and program.choice("skip") != "none":
        without("gradients are zeros")  # rank 0 alone would have none at all, which optimizers tell from zeros
    if program.choice("uneven") != "none":
        plain("skip", "freeze", "accumulate", "average", "again", "log", "precision", "compression")
        program.blocks[:] = [
            "Linear()" if "OnOneRank" in b or "norm=True" in b or "Dropped" in b else b for b in program.blocks
        ]
        if program.choice("extra") != "regulariser over all parameters":
            plain("extra")
    if program.choice("skip") == "None on one rank" and program.choice("log") in ("synchronised", "per epoch"):
        plain("log")
    if "saliency" in program.choice("extra") and program.choice("validation") == "none":
        choices["validation"] = "synchronised loss"
    if program.choice("optimizer") == "LBFGS":
        plain("groups", "clip", "accumulate", "skip", "freeze")
        program.blocks[:] = ["Linear()" if "Conv" in block or "Shapes" in block else block for block in program.blocks]
        without("every third step", "gradients")
    if program.choice("schedule") == "one cycle" and program.choice("optimizer") in ("Adagrad", "ASGD", "LBFGS"):
        plain("schedule")  # it cycles a momentum that they lack
    _settle_freezing(program, plain, without)
    if program.choice("average") == "SWA":
        plain("again", "accumulate", "extra")
    if "Dropped()" in program.blocks and program.choice("again").startswith("resumed"):
        plain("again")  # ring restores the random state, DDP does not
    if program.choice("again") == "resumed on another number of ranks" and (
        "one" not in program.strategies or "Conv(norm=True)" in program.blocks
    ):
        choices["again"] = "resumed on another strategy"
    if program.choice("schedule") == "on a plateau" and (
        program.choice("validation") == "none" or "Conv(norm=True)" in program.blocks
    ):
        plain("schedule")


def _settle_blocks(program: Program) -> None:
    blocks, choices = program.blocks, program.choices
    if program.choice("extra") in _BY_GRAD:  # reentrant checkpoints work with backward() alone
        blocks[:] = ["Linear()" if "reentrant=True" in block else block for block in blocks]
    if program.choice("extra") == "torch.func.grad" and blocks[0] not in _FUNCTIONAL:
        blocks.insert(0, "Linear()")
    if "Embedded(sparse=True)" in blocks:
        choices["optimizer"], choices["precision"] = "SGD without momentum", "64-true"
        for axis in ("clip", "extra", "groups", "compression", "average"):
            choices.pop(axis, None)
        program.hooks[:] = [hook for hook in program.hooks if hook.startswith("reads")]
        if "by reference" in program.choice("training"):
            choices.pop("training")
    if "Complex()" in blocks and program.choice("optimizer") not in ("SGD", "SGD without momentum", "Adam"):
        choices["optimizer"] = "SGD"
    if all(block in ("Unused()", "Frozen()", "Dropped()", "OnOneRank()", "EveryOtherStep()") for block in blocks):
        blocks.append("Linear()")


def _settle_freezing(program: Program, plain: object, without: object) -> None:
    freeze = program.choice("freeze")
    if freeze == "none":
        return
    assert callable(plain)
    assert callable(without)
    blocks = program.blocks
    if blocks[0] != "Linear()":
        blocks.insert(0, "Linear()")
    if len(blocks) < 2 or blocks[-1] != "Linear()":
        blocks.append("Linear()")
    if "optimizer" in freeze:
        plain("schedule", "average", "again")
    if freeze in ("finetuning callback", "new layer in the second epoch"):
        plain("again", "average", "groups", "schedule")
        without("average of weights", "best weights")


def differs_in_one_process(program: Program) -> bool:
    """Whether what a rank does to its own gradients means something else where one process plays all ranks."""
    local = any(word in program.choice("extra") for word in _LOCAL)
    several = program.choice("training") not in ("automatic", "manual") or program.choice("accumulate") != "1"
    counted = any("post-accumulate" in hook for hook in program.hooks)
    reentrant = any("reentrant=True" in block or block == "OnOneRank()" for block in program.blocks)
    return (local and several) or (counted and (reentrant or several))
