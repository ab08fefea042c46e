"""Rules: which features of a random program go together, and which programs lightning_ring refuses.

`settle` takes out what has no meaning beside the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.program import Program

_BY_GRAD = ("adversarial example by autograd.grad", "gradient penalty", "torch.func.grad")
_FUNCTIONAL = ("Linear()", "Norm()", "Twice()", "Method()", "Large()")
_LOCAL = ("on rank 0", "some ranks")
_CHANGES_GRADIENTS = (
    "scales gradients",
    "assigns gradients",
    "post-accumulate hook",
    "keeps gradients",
)


def settle(program: Program) -> None:
    """Change ``program`` in place; twice is as once."""
    choices, hooks = program.choices, program.hooks

    def plain(*axes: str) -> None:
        for axis in axes:
            choices.pop(axis, None)

    def without(*names: str) -> None:
        hooks[:] = [hook for hook in hooks if not any(name in hook for name in names)]

    if program.choice("compression") != "none":  # 64-bit gradients are not compressed
        lossy = "(" in program.choice("compression")
        choices["precision"], choices["optimizer"] = (
            "32-true",
            "SGD without momentum" if lossy else "SGD",
        )
        plain("uneven", "average", "freeze")
        if lossy:
            choices["again"] = "resumed, and straight"
            if program.choice("buckets") == "auto":
                # sizes that are measured behind the checkpoint are others in each training
                plain("buckets")
            program.blocks[:] = [
                "Linear()" if b in ("Complex()", "Dropped()") else b for b in program.blocks
            ]
    _settle_blocks(program)
    if program.family != "trainer":
        _settle_loop(program, plain, without)
    if program.choice("training") != "automatic":
        plain("accumulate", "skip", "uneven", "average")
        if "clipped" in program.choice("training") or "step in backward" in program.choice(
            "training"
        ):
            plain("clip", "groups", "freeze", "schedule", "again", "average")
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
            program.blocks[:] = [
                "Linear()" if block == "Dropped()" else block for block in program.blocks
            ]
            plain("freeze")
    if must_be_refused(program):
        without("gradient", "hook")  # there is none after backward
    if "by reference" in program.choice("training") and any(
        word in program.choice("extra") for word in _LOCAL
    ):
        plain("extra")  # a rank that adds to a gradient it keeps changes it for itself
    if (
        program.choice("extra") == "backward between two steps on rank 0"
        and program.choice("skip") != "none"
    ):
        # rank 0 alone would have none at all, which optimizers tell from zeros
        without("gradients are zeros")
    if program.choice("uneven") != "none":
        plain("skip", "freeze", "accumulate", "average", "again", "log", "precision", "compression")
        program.blocks[:] = [
            "Linear()" if "OnOneRank" in b or "norm=True" in b or "Dropped" in b else b
            for b in program.blocks
        ]
        if program.choice("extra") != "regulariser over all parameters":
            plain("extra")
    if program.choice("skip") == "None on one rank" and program.choice("log") in (
        "synchronised",
        "per epoch",
    ):
        plain("log")
    if "saliency" in program.choice("extra") and program.choice("validation") == "none":
        choices["validation"] = "synchronised loss"
    if program.choice("optimizer") == "LBFGS":
        plain("groups", "clip", "accumulate", "skip", "freeze")
        program.blocks[:] = [
            "Linear()" if "Conv" in block or "Shapes" in block else block
            for block in program.blocks
        ]
        without("every third step", "gradients")
    if program.choice("schedule") == "one cycle" and program.choice("optimizer") in (
        "Adagrad",
        "ASGD",
        "LBFGS",
    ):
        plain("schedule")  # it cycles a momentum that they lack
    _settle_freezing(program, plain, without)
    if program.choice("callback") != "none":
        plain("average", "again", "uneven")
        if program.choice("callback") != "ModelPruning" and program.choice("validation") == "none":
            choices["validation"] = "twice an epoch"
        # scores
        program.blocks[:] = [
            "Conv()" if "norm=True" in block else block for block in program.blocks
        ]
    # it looks at what a module's last forward computed
    if program.choice("callback") == "ModelPruning":
        program.blocks[:] = [
            "Linear()" if block == "OnOneRank()" else block for block in program.blocks
        ]
    if program.choice("average") == "SWA":
        plain("again", "accumulate", "extra")
    elif program.choice("average") == "EMA" and program.choice("again") == "resumed, and straight":
        # the end of a fit puts the average into the model, and so into the checkpoint behind it
        plain("again")
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


def _settle_loop(
    program: Program, plain: Callable[..., None], without: Callable[..., None]
) -> None:
    choices = program.choices
    without("gradients are zeros", "every third step")  # methods of a LightningModule
    if program.choice("precision") in ("double module", "bf16-mixed"):
        plain("precision")
    if program.choice("optimizer") == "LBFGS":  # it takes a closure
        plain("optimizer")
    if program.choice("clip") == "overridden":
        plain("clip")
    if program.choice("again") == "fit twice":
        plain("again")
    if any(word in program.choice("extra") for word in ("saliency", *_LOCAL)):
        plain("extra")  # a backward on one rank more
    if any(word in program.choice("freeze") for word in ("new", "own", "callback")):
        plain("freeze")
    if program.choice("stepping").startswith("in backward"):
        plain(
            "window",
            "clip",
            "scaler",
            "failure",
            "groups",
            "again",
            "freeze",
            "compression",
        )
    elif program.choice("stepping") == "two optimizers":
        plain("freeze")
        # it would read, before the second step, what the first one has under way
        program.hooks[:] = [
            hook for hook in program.hooks if hook != "average of weights before a step"
        ]
        if len(program.blocks) < 2:
            program.blocks.append("Linear()")
    if program.choice("scaler") != "none":
        program.blocks[:] = [
            "Linear()" if "sparse" in b or b == "Complex()" else b for b in program.blocks
        ]
        if "clipped" in program.choice("window"):
            plain("window")  # a scaler unscales once a step
    if program.family == "horovod":
        if program.choice("window") != "1":
            choices["window"] = "2, the first one local"
        uncommon = (
            "EveryOtherStep()",
            "OnOneRank()",
            "Unused()",
            "Embedded(sparse=True)",
            "Dropped()",
        )
        program.blocks[:] = ["Linear()" if block in uncommon else block for block in program.blocks]
        program.hooks[:] = [
            hook
            for hook in program.hooks
            if "after backward" not in hook and "gradient" not in hook
        ]


def _settle_blocks(program: Program) -> None:
    blocks, choices = program.blocks, program.choices
    if "raises" in program.choice("training") + program.choice("failure"):
        choices.pop("extra", None)  # whose own backward raises too
        if "Raises()" not in blocks:
            if len(blocks) < 2:
                blocks.append("Linear()")
            blocks.insert(1, "Raises()")
        # a rank whose backward raises before it has made any gradient does not count it
        uncommon = ("OnOneRank()", "EveryOtherStep()", "Dropped()")
        blocks[:] = [
            "Linear()" if "reentrant=True" in block or block in uncommon else block
            for block in blocks
        ]
    else:
        blocks[:] = [block for block in blocks if block != "Raises()"]
    if program.choice("extra") in _BY_GRAD:  # reentrant checkpoints work with backward() alone
        blocks[:] = ["Linear()" if "reentrant=True" in block else block for block in blocks]
    if program.choice("extra") == "torch.func.grad" and blocks[0] not in _FUNCTIONAL:
        blocks.insert(0, "Linear()")
    if "Embedded(sparse=True)" in blocks:
        choices["optimizer"], choices["precision"] = "SGD without momentum", "64-true"
        for axis in ("clip", "extra", "groups", "compression", "average", "callback"):
            choices.pop(axis, None)
        program.hooks[:] = [hook for hook in program.hooks if hook.startswith("reads")]
        if "by reference" in program.choice("training"):
            choices.pop("training")
    if "Complex()" in blocks and program.choice("optimizer") not in (
        "SGD",
        "SGD without momentum",
        "Adam",
    ):
        choices["optimizer"] = "SGD"
    if all(
        block in ("Unused()", "Frozen()", "Dropped()", "OnOneRank()", "EveryOtherStep()")
        for block in blocks
    ):
        blocks.append("Linear()")


def _settle_freezing(
    program: Program, plain: Callable[..., None], without: Callable[..., None]
) -> None:
    freeze = program.choice("freeze")
    if freeze == "none":
        return
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
    """Whether what a rank does to its own gradients means something else where one process plays
    all ranks.
    """
    local = any(word in program.choice("extra") for word in _LOCAL)
    several = (
        program.choice("training") not in ("automatic", "manual")
        or program.choice("accumulate") != "1"
    )
    several = several or program.choice("window") != "1"
    counted = any("post-accumulate" in hook for hook in program.hooks)
    reentrant = any("reentrant=True" in block or block == "OnOneRank()" for block in program.blocks)
    return (local and several) or (counted and (reentrant or several))


def must_be_refused(program: Program) -> bool:
    """Whether each rank steps gradients of its own, before they are averaged: an error, and
    never drift.
    """
    return "in backward" in program.choice("stepping") + program.choice("training")


def refusals(program: Program, strategy: str) -> dict[str, str]:
    """Errors that the documentation states for ``program`` under ``strategy``: what, and a
    pattern of the message.
    """
    found = {}
    if must_be_refused(program):
        found["an optimizer that steps in backward"] = r"step"
    if strategy == "ring_sharded":
        if "(" in program.choice("compression") and not program.choice("compression").startswith(
            "Int8"
        ):
            found["a compressor without shards"] = r"cannot leave each rank its shard of a sum"
        if "reads optimizer state" in program.hooks:
            found["optimizer state between steps"] = r"\.state was used outside of step\(\)"
        if any(
            hook.startswith(("reads gradients", "keeps gradients")) for hook in program.hooks
        ) or ("by reference" in program.choice("training")):
            found["the elements of an averaged gradient"] = (
                r"was called with .*\.grad\. Under strategy='ring_sharded'|before a backward "
                r"averaged it\. Under"
            )
        several = (
            program.choice("training") not in ("automatic", "manual")
            or program.choice("window") != "1"
        )
        if several and program.choice("extra") == "backward between two steps on rank 0":
            found["averages that one rank has dropped"] = (
                r"ranks keep averages of an earlier backward"
            )
        if several and any(hook.startswith(_CHANGES_GRADIENTS) for hook in program.hooks):
            found["a sum on an average that was changed"] = r"has added to .* after it was averaged"
    return found
