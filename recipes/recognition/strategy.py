"""What a metric loss over all ranks, and a sharded head, need of the strategy."""

from __future__ import annotations

import lightning as L

from lightning_ring.errors import ConfigurationError


def check_strategy(
    trainer: L.Trainer, *, gathers: bool, sharded: bool, remembers: bool, stage: str
) -> None:
    """Refuse what would silently compute something else than one process on the whole batch.

    Args:
        gathers, sharded: The metric loss sees the embeddings of all ranks; its classes are spread
            over them.
        remembers: It has a memory of earlier batches.
        stage: As of `LightningModule.setup`.

    Raises:
        ConfigurationError: The strategy or the Trainer cannot do it.
    """
    if sharded and stage == "fit":
        _check_steps(trainer)
    if trainer.world_size > 1 and remembers and not gathers and stage == "fit":
        raise ConfigurationError(
            "a memory of earlier batches is a buffer, of which all ranks get rank 0's: the other "
            "ranks' images would be forgotten. Set model.gather_embeddings=true, or loss.memory=0."
        )
    if trainer.world_size == 1 or not (gathers or sharded):
        return
    strategy = trainer.strategy
    options = getattr(strategy, "options", None)
    if sharded and (options is None or getattr(strategy, "communicator", None) is None):
        raise ConfigurationError(
            "the sharded head exchanges logits through lightning_ring, but the strategy is "
            f"{type(strategy).__name__}. Use strategy=ring or strategy=ring_sharded."
        )
    if options is None:
        return
    what = "the sharded head" if sharded else "gather_embeddings=true"
    if getattr(strategy, "strategy_name", "") == "ring_elastic":
        raise ConfigurationError(f"{what} needs a fixed number of ranks. Use strategy=ring.")
    if options.uneven == "join":
        raise ConfigurationError(
            f"{what} takes a batch of every rank at each step, which ranks without data do not "
            "have. Use strategy.uneven=error, and a sampler that gives all ranks as many batches."
        )
    if stage == "fit" and options.new_algorithm().steps_alone:
        raise ConfigurationError(
            f"{what} needs gradients that are averaged at each step, but under this algorithm "
            "ranks step alone. Use strategy=ring or strategy=ring_sharded."
        )


def _check_steps(trainer: L.Trainer) -> None:
    """The sharded head steps its own weights: nothing else may change their gradients."""
    if trainer.gradient_clip_val:
        raise ConfigurationError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} would clip the embedder's "
            "gradients alone, and not those of the sharded head. Leave it out."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            f"trainer.precision={trainer.precision} scales the loss, and the sharded head's step "
            "would not undo it. Use bf16-mixed or 32-true."
        )
