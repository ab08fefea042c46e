"""Rules: which features of a random program go together, and which programs lightning_ring refuses.

`settle` takes out what has no meaning beside the rest.
"""

_BY_GRAD = ("adversarial example by autograd.grad", "gradient penalty", "torch.func.grad")
_FUNCTIONAL = ("Linear()", "Norm()", "Twice()", "Method()", "Large()")
_LOCAL = ("on rank 0", "some ranks")
_CHANGES_GRADIENTS = (
    "scales gradients",
    "assigns gradients",
    "post-accumulate hook",
    "keeps gradients",
)


def _plain_blocks(blocks, *words):
    """Put a plain layer into the place of each block that has one of ``words`` in it."""
    blocks[:] = ["Linear()" if any(word in block for word in words) else block for block in blocks]


def settle(program):
    """Change ``program`` in place; twice is as once."""
    choice = program.choice
    choices, hooks = program.choices, program.hooks

    def plain(*axes):
        for axis in axes:
            choices.pop(axis, None)

    def without(*names):
        hooks[:] = [hook for hook in hooks if not any(name in hook for name in names)]

    if choice("compression") != "none":  # 64-bit gradients are not compressed
        lossy = "(" in choice("compression")
        choices["precision"], choices["optimizer"] = (
            "32-true",
            "SGD without momentum" if lossy else "SGD",
        )
        plain("freeze")
        if lossy:
            choices["again"] = "resumed, and straight"
            _plain_blocks(program.blocks, "Complex", "Dropped")
    _settle_blocks(program)
    if program.family != "trainer":
        _settle_loop(program, plain, without)
    if choice("training") != "automatic":
        plain("accumulate", "skip")
        if "clipped" in choice("training") or "step in backward" in choice("training"):
            plain("clip", "groups", "freeze", "schedule", "again")
        without("every third step", "gradients are zeros")
        if choice("clip") == "overridden":
            plain("clip")
        if choice("schedule") == "on a plateau":
            plain("schedule")
        if choice("optimizer") == "LBFGS":
            plain("optimizer")
        if "two optimizers" in choice("training"):
            if len(program.blocks) < 2:
                program.blocks.append("Linear()")
            _plain_blocks(program.blocks, "Dropped")
            plain("freeze")
    if must_be_refused(program):
        without("gradient", "hook")  # there is none after backward
    if "by reference" in choice("training") and any(word in choice("extra") for word in _LOCAL):
        plain("extra")  # a rank that adds to a gradient it keeps changes it for itself
    if choice("extra") == "backward between two steps on rank 0" and choice("skip") != "none":
        # rank 0 alone would have none at all, which optimizers tell from zeros
        without("gradients are zeros")
    if choice("skip") == "None on one rank" and choice("log") in ("synchronised", "per epoch"):
        plain("log")
    if "saliency" in choice("extra") and choice("validation") == "none":
        choices["validation"] = "synchronised loss"
    if choice("optimizer") == "LBFGS":
        plain("groups", "clip", "accumulate", "skip", "freeze")
        _plain_blocks(program.blocks, "Conv", "Shapes")
        without("every third step", "gradients")
    if choice("schedule") == "one cycle" and choice("optimizer") in ("Adagrad", "ASGD", "LBFGS"):
        plain("schedule")  # it cycles a momentum that they lack
    _settle_freezing(program, plain, without)
    if "Dropped()" in program.blocks and choice("again").startswith("resumed"):
        plain("again")  # ring restores the random state, DDP does not
    if choice("again") == "resumed on another number of ranks" and (
        "one" not in program.strategies or "Conv(norm=True)" in program.blocks
    ):
        choices["again"] = "resumed on another strategy"
    if choice("schedule") == "on a plateau" and (
        choice("validation") == "none" or "Conv(norm=True)" in program.blocks
    ):
        plain("schedule")


def _settle_loop(program, plain, without):
    choice = program.choice
    choices = program.choices
    without("gradients are zeros", "every third step")  # methods of a LightningModule
    if choice("precision") in ("double module", "bf16-mixed"):
        plain("precision")
    if choice("optimizer") == "LBFGS":  # it takes a closure
        plain("optimizer")
    if choice("clip") == "overridden":
        plain("clip")
    if choice("again") == "fit twice":
        plain("again")
    if any(word in choice("extra") for word in ("saliency", *_LOCAL)):
        plain("extra")  # a backward on one rank more
    if any(word in choice("freeze") for word in ("new", "own", "callback")):
        plain("freeze")
    if choice("stepping").startswith("in backward"):
        plain("window", "clip", "scaler", "failure", "groups", "again", "freeze", "compression")
    elif choice("stepping") == "two optimizers":
        plain("freeze")
        without("average of weights")  # it would read what the first one has just stepped
        if len(program.blocks) < 2:
            program.blocks.append("Linear()")
    if choice("scaler") != "none":
        _plain_blocks(program.blocks, "sparse", "Complex")
        if "clipped" in choice("window"):
            plain("window")  # a scaler unscales once a step
    if program.family == "horovod":
        if choice("window") != "1":
            choices["window"] = "2, the first one local"
        uncommon = (
            "EveryOtherStep()",
            "OnOneRank()",
            "Unused()",
            "Embedded(sparse=True)",
            "Dropped()",
        )
        _plain_blocks(program.blocks, *uncommon)
        program.hooks[:] = [
            hook
            for hook in program.hooks
            if "after backward" not in hook and "gradient" not in hook
        ]


def _settle_blocks(program):
    choice = program.choice
    blocks, choices = program.blocks, program.choices
    if "raises" in choice("training") + choice("failure"):
        choices.pop("extra", None)  # whose own backward raises too
        if "Raises()" not in blocks:
            if len(blocks) < 2:
                blocks.append("Linear()")
            blocks.insert(1, "Raises()")
        # a rank whose backward raises before it has made any gradient does not count it
        _plain_blocks(blocks, "reentrant=True", "OnOneRank()", "EveryOtherStep()", "Dropped()")
    else:
        blocks[:] = [block for block in blocks if block != "Raises()"]
    if choice("extra") in _BY_GRAD:  # reentrant checkpoints work with backward() alone
        _plain_blocks(blocks, "reentrant=True")
    if choice("extra") == "torch.func.grad" and blocks[0] not in _FUNCTIONAL:
        blocks.insert(0, "Linear()")
    if "Embedded(sparse=True)" in blocks:
        choices["optimizer"], choices["precision"] = "SGD without momentum", "64-true"
        for axis in ("clip", "extra", "groups", "compression"):
            choices.pop(axis, None)
        program.hooks[:] = [hook for hook in program.hooks if hook.startswith("reads")]
        if "by reference" in choice("training"):
            choices.pop("training")
    if "Complex()" in blocks and choice("optimizer") not in ("SGD", "SGD without momentum", "Adam"):
        choices["optimizer"] = "SGD"
    if all(
        block in ("Unused()", "Frozen()", "Dropped()", "OnOneRank()", "EveryOtherStep()")
        for block in blocks
    ):
        blocks.append("Linear()")


def _settle_freezing(program, plain, without):
    choice = program.choice
    freeze = choice("freeze")
    if freeze == "none":
        return
    blocks = program.blocks
    if blocks[0] != "Linear()":
        blocks.insert(0, "Linear()")
    if len(blocks) < 2 or blocks[-1] != "Linear()":
        blocks.append("Linear()")
    if "optimizer" in freeze:
        plain("schedule", "again")
    if freeze in ("finetuning callback", "new layer in the second epoch"):
        plain("again", "groups", "schedule")
        without("average of weights", "best weights")


def differs_in_one_process(program):
    """Whether what a rank does to its own gradients means something else where one process plays
    all ranks.
    """
    choice = program.choice
    local = any(word in choice("extra") for word in _LOCAL)
    several = choice("training") not in ("automatic", "manual") or choice("accumulate") != "1"
    several = several or choice("window") != "1"
    counted = any("post-accumulate" in hook for hook in program.hooks)
    reentrant = any("reentrant=True" in block or block == "OnOneRank()" for block in program.blocks)
    return (local and several) or (counted and (reentrant or several))


def must_be_refused(program):
    """Whether each rank steps gradients of its own, before they are averaged: an error, and
    never drift.
    """
    choice = program.choice
    return "in backward" in choice("stepping") + choice("training")


def refusals(program, strategy):
    """Errors that the documentation states for ``program`` under ``strategy``: what, and a
    pattern of the message.
    """
    choice = program.choice
    found = {}
    if must_be_refused(program):
        found["an optimizer that steps in backward"] = r"step"
    if strategy == "ring_sharded":
        if "(" in choice("compression") and not choice("compression").startswith("Int8"):
            found["a compressor without shards"] = r"cannot leave each rank its shard of a sum"
        if "reads optimizer state" in program.hooks:
            found["optimizer state between steps"] = r"\.state was used outside of step\(\)"
        if any(
            hook.startswith(("reads gradients", "keeps gradients")) for hook in program.hooks
        ) or ("by reference" in choice("training")):
            found["the elements of an averaged gradient"] = (
                r"was called with .*\.grad\. Under strategy='ring_sharded'|before a backward "
                r"averaged it\. Under"
            )
        several = choice("training") not in ("automatic", "manual") or choice("window") != "1"
        if several and choice("extra") == "backward between two steps on rank 0":
            found["averages that one rank has dropped"] = (
                r"ranks keep averages of an earlier backward"
            )
        if several and any(hook.startswith(_CHANGES_GRADIENTS) for hook in program.hooks):
            found["a sum on an average that was changed"] = r"has added to .* after it was averaged"
    return found
