"""A fit that all ranks enter again, in the same processes, from a checkpoint that they hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_ring.elastic.recovery import EnterAgain

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


class EnteringLauncher(_Launcher):
    """Calls ``trainer.fit``'s implementation each time the ranks enter the fit.

    Lightning hands its entry points to the strategy's launcher: no method is replaced.
    """

    is_interactive_compatible = True

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        if trainer is None or function.__name__ != "_fit_impl":
            return function(*args, **kwargs)
        call = inspect.signature(function).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments["ckpt_path"]
        with self._strategy.entering(trainer, given):
            while True:
                try:
                    return function(*call.args, **call.kwargs)
                except EnterAgain:
                    pass
                except Exception as error:
                    if not self._enters_again_after(error):
                        raise
                fit = self._strategy.current_fit
                assert fit is not None
                self._strategy.leave_loops(fit)
                call.arguments["ckpt_path"] = fit.prepare_entry()

    def _enters_again_after(self, error: Exception) -> bool:
        """Whether all ranks hold a checkpoint after deaths in the set-up.

        Raises:
            Exception: ``error``, if no rank has died.
        """
        fit = self._strategy.current_fit
        if fit is None or fit.held is None:
            return False
        try:
            fit.recovery.after(error)
        except EnterAgain:
            return True
        return False

    def kill(self, signum: int) -> None:
        """Lightning calls it when it gets a signal itself. In a rank there is nothing to kill."""
