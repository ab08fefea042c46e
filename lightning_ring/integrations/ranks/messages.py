"""Lightning's start-up messages: each once, and none that only Lightning's authors can act on."""

from __future__ import annotations

import logging
import warnings

_RANK_0_SAYS = ("GPU available", "TPU available", "💡 Tip")


def leave_start_up_messages_to_rank_0() -> None:
    """In the process that starts the ranks: they build the same Trainer again, and rank 0 prints
    these.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_not_said_by_rank_0)


def _is_not_said_by_rank_0(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_RANK_0_SAYS)


def ignore_deprecations_between_libraries() -> None:
    """Lightning's calls of torch's deprecated functions are not the user's to change.

    Filters that are there already come first: ``python -W default::FutureWarning`` shows them.
    """
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings(
            "ignore", "", category, module=r"(lightning|torch|torchmetrics)(\.|$)", append=True
        )
