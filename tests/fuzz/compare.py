"""What the outcomes of one program under several strategies say: they agree, or one of them is
wrong.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from tests.fuzz.rules import differs_in_one_process, must_be_refused, refusals

REFERENCES = ("one", "ddp")


@dataclass
class Verdict:
    """``kind``: AGREE, ALL RAISE, REFUSED, DISAGREE, RAISES, ONE RAISES, HANG, CRASH or LEAKS.

    ``notes``: what the references could not do.
    """

    kind: str
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fails(self):
        return self.kind in ("DISAGREE", "RAISES", "ONE RAISES", "HANG", "CRASH", "LEAKS")


def judge(program, outcomes):
    notes = []
    findings = []
    sound = _sound_references(program, outcomes, notes)
    kinds = set()
    for name, outcome in outcomes.items():
        if name in REFERENCES:
            continue
        if outcome.kind != "ok":
            kinds.add(_kind_of_failure(program, name, outcomes))
            findings.append(f"{name} {outcome.kind}: {_last_line(outcome)}")
            continue
        differences = [f"{name} trains what the documentation says it refuses"] * must_be_refused(
            program
        )
        differences += [f"{name}'s ranks differ: {line}" for line in _between_ranks(outcome)]
        for rank, straight in zip(outcome.ranks, outcome.straight, strict=False):
            lines = _different(rank["weights"], straight["weights"], 0.0)
            differences += [f"{name} resumed, and straight: {line}" for line in lines]
        for reference, expected in sound.items():
            limit = tolerance(program, name, reference)
            lines = _against(program, name, reference, outcome, expected, limit)
            differences += [f"{name} and {reference}: {line}" for line in lines]
        if differences:
            kinds.add("DISAGREE")
            findings += differences[:3]
    one = outcomes.get("one")
    if not kinds and one is not None and one.kind != "ok":  # all strategies trained
        kinds.add("ONE RAISES")
    for kind in ("DISAGREE", "HANG", "CRASH", "RAISES", "ONE RAISES", "ALL RAISE"):
        if kind in kinds:
            return Verdict(kind, findings, notes)
    return Verdict(kinds.pop() if kinds else "AGREE", findings, notes)


def _sound_references(program, outcomes, notes):
    """One process and DDP, where they trained; what they could not do goes into ``notes``.

    Where they differ from each other, the one that `ring` is equal to counts, and the other one is
    noted.
    """
    sound = {}
    for name in REFERENCES:
        outcome = outcomes.get(name)
        if outcome is None:
            continue
        if outcome.kind != "ok":
            notes.append(f"{name} cannot ({outcome.kind}): {_last_line(outcome)}")
        elif different := list(_between_ranks(outcome)):
            notes.append(f"{name}'s own ranks differ: {different[0]}")
        else:
            sound[name] = outcome
    ring = outcomes.get("ring")
    if "one" not in sound and "Embedded(sparse=True)" in program.blocks and "ddp" in sound:
        notes.append(
            "ddp does not count: with sparse gradients it stands alone wherever one "
            "process can be asked"
        )
        del sound["ddp"]
    if len(sound) == 2 and ring is not None and ring.kind == "ok":
        equal = {
            name: not any(
                _against(program, "ring", name, ring, sound[name], tolerance(program, "ring", name))
            )
            for name in sound
        }
        limit = tolerance(program, "ddp", "one")
        if sum(equal.values()) == 1 and any(
            _against(program, "ddp", "one", sound["ddp"], sound["one"], limit)
        ):
            wrong = "ddp" if equal["one"] else "one"
            notes.append(f"{wrong} stands alone: ring and the other reference agree")
            del sound[wrong]
    return sound


def _kind_of_failure(program, name, outcomes):
    outcome = outcomes[name]
    if outcome.kind != "error":
        return outcome.kind.upper()
    references = [outcomes[name] for name in REFERENCES if name in outcomes]
    same = [
        other
        for other in references
        if other.errors and other.errors[0]["kinds"] == outcome.errors[0]["kinds"]
    ]
    if same and not any(other.kind == "ok" for other in references):
        return "ALL RAISE"
    refused = _refusal(program, name, outcome)
    return f"REFUSED: {refused}" if refused else "RAISES"


def tolerance(program, name, reference):
    """The largest difference that counts as equal, against ``max(1, |largest value|)``.

    0 (the same bits) for ``ring`` and DDP on two ranks, where a + b is b + a; 1e-12 where sums come
    in another order; 1e-10 for norms that are summed over shards, and for RMSprop, whose first
    steps divide rounding by roots near 0; 1e-9 for one process, which averages rows in another
    order, after 8 steps of optimizers that divide by small numbers. In 32 bits the same in units of
    its rounding.
    """
    if program.choice("compression") != "none":
        return 0.05
    small = program.choice("precision") in ("32-true", "bf16-mixed")
    if reference == "one":
        limit = 1e-9
    elif name == "ring_sharded":
        limit = 1e-10
    else:
        limit = (
            1e-12
            if program.ranks > 2 or any(option.rounding for option in program.options())
            else 0.0
        )
        limit = 1e-10 if limit and program.choice("optimizer") == "RMSprop" else limit
    if program.source_of and limit < 1e-10:  # the checkpoint may come from ring_sharded
        limit = 1e-10
    return {0.0: 0.0, 1e-12: 1e-5, 1e-10: 1e-3}[limit] if small else limit


def _against(program, name, reference, mine, expected, limit):
    alone = reference == "one"
    batch_norm = "Conv(norm=True)" in program.blocks
    parts = ["weights", "state"]
    if not batch_norm and not (alone and program.choice("log") == "of each rank"):
        parts.append("metrics")
    if not alone:
        parts.append("buffers")
    if alone and differs_in_one_process(program):
        return
    if program.choice("batches") == "even":  # else ranks see different numbers of steps
        parts.append("seen")
    if not alone and name == "ring":
        parts.append("gradients")
    for rank, (a, b) in enumerate(zip(mine.ranks, expected.ranks, strict=False)):
        for part in parts:
            if part == "buffers" and rank > 0:
                continue  # the others' BatchNorm statistics are their own
            in_float32 = part == "metrics" and program.choice("validation") == "metric object"
            at_most = max(limit, 1e-6) if in_float32 else limit
            for line in _different(_known(a[part], alone), _known(b[part], alone), at_most):
                yield f"{part} of rank {rank}: {line}"


def _known(numbers, alone):
    """Without what one process counts differently: a maximum over ranks of their means.

    And without a key that torch adds to a group when it loads a state dict.
    """
    unknown = (".differentiable", ".top") if alone else (".differentiable",)
    return {name: value for name, value in numbers.items() if not name.endswith(unknown)}


def _between_ranks(outcome):
    for rank, other in enumerate(outcome.ranks[1:], start=1):
        for line in _different(other["weights"], outcome.ranks[0]["weights"], 0.0):
            yield f"rank {rank} and rank 0: {line}"


def _different(mine, expected, limit):
    if mine.keys() != expected.keys():
        yield f"only in one of them: {sorted(mine.keys() ^ expected.keys())[:6]}"
        return
    for name, value in expected.items():
        if isinstance(value, str) or isinstance(mine[name], str):
            if value != mine[name]:
                yield f"{name} is {mine[name]}, not {value}"
        elif mine[name].shape != value.shape:
            yield f"{name} has shape {mine[name].shape}, not {value.shape}"
        elif value.size and not np.array_equal(mine[name], value, equal_nan=True):
            difference = float(np.max(np.abs(mine[name] - value)))
            size = max(1.0, float(np.max(np.abs(value))))
            if not difference <= limit * size:
                yield f"{name} differs by {difference:.3g}"


def _refusal(program, name, outcome):
    """Which refusal this is that `rules` predict, the same error on every rank; `None` for any
    other error.
    """
    texts = {rank["error"] for rank in outcome.errors}
    # torch makes the latter of an access to memory that cannot be read
    kinds = {"RingError", "RuntimeError"}
    if (
        len(texts) != 1
        or len(outcome.errors) != len(outcome.ranks)
        or kinds.isdisjoint(outcome.errors[0]["kinds"])
    ):
        return None
    found = texts.pop()
    return next(
        (what for what, pattern in refusals(program, name).items() if re.search(pattern, found)),
        None,
    )


def _last_line(outcome):
    if outcome.errors:
        error = outcome.errors[0]
        return f"{error['kinds'][0]}: {error['error'][:300]}".replace("\n", " ")
    return outcome.text.strip().splitlines()[-1][:300] if outcome.text.strip() else "no output"
