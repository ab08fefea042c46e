"""One choice that a random program makes, and the lines that it puts into the program's script."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Option:
    """What a program does in one respect.

    Attributes:
        weight: How often it is drawn, against the other options of its axis.
        code: Place in the script (`script.TEMPLATE`) -> lines for it.
        without: Strategies that the program is not run with, because it means something else there,
            or would hang.
        unused: Some backward leaves out parameters: DDP has to look for them.
        rounding: Sums are taken in another order than in DDP: equal to 1e-12 and not in every bit.
    """

    weight: float = 1.0
    code: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    unused: bool = False
    rounding: bool = False


def option(weight=1.0, without="", unused=False, rounding=False, **code):
    return Option(weight, code, tuple(without.split()), unused, rounding)
