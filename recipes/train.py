"""Trains, then tests, what the configuration says: ``python recipes/train.py --help``."""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

# run as a script: make `recipes` importable, instead of this folder's modules at the top level
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from recipes.start import check, is_typed, label, rank_zero_folder, start_ranks
from recipes.sweep import RESULT, goes_on_after

OmegaConf.register_new_resolver("rank_zero_folder", rank_zero_folder, use_cache=True, replace=True)
OmegaConf.register_new_resolver("label", label, replace=True)


def train(config: DictConfig) -> dict[str, float]:
    """One run: fit, then test the best checkpoint (the last weights where there is none).
    Returns the test metrics.
    """
    check(config)
    start_ranks(config)
    import lightning as L  # here, because it takes seconds for which --help need not wait
    from lightning.pytorch.callbacks import LambdaCallback

    from lightning_ring.monitor.terminal import replace_bars
    from lightning_ring.tools.masking import masked

    L.seed_everything(config.seed, workers=True, verbose=False)
    model, data = model_and_data(config)
    callbacks = [instantiate(callback) for callback in config.callbacks.values() if callback]
    before: list[int] = []  # epochs and steps of the run that this one goes on from

    # A callback, because the process that only starts the ranks must not open a log.
    def on_train_start(trainer: Any, _: Any) -> None:
        before.extend((trainer.current_epoch, trainer.global_step))
        for logger in trainer.loggers:
            logger.log_hyperparams(masked(OmegaConf.to_container(config, resolve=True)))

    callbacks.append(LambdaCallback(on_train_start=on_train_start))
    logger = instantiate(config.logger) or False
    strategy = instantiate(config.strategy)
    trainer = instantiate(config.trainer, strategy=strategy, logger=logger, callbacks=callbacks)
    replace_bars(trainer)  # RingStrategy does it too; here for all strategies

    start = time.perf_counter()
    trainer.fit(model, data, ckpt_path=config.ckpt_path)
    seconds = time.perf_counter() - start
    metrics: dict[str, float] = {}
    epochs, steps = trainer.current_epoch, trainer.global_step
    if before:
        epochs, steps = epochs - before[0], steps - before[1]
    if config.test:
        best = trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path
        metrics = test(trainer, model, data, best or None)
    log_result(trainer, config, metrics)
    if trainer.is_global_zero:
        folder = Path(HydraConfig.get().runtime.output_dir)
        result = {"ranks": trainer.world_size, "epochs": epochs, "steps": steps, "seconds": seconds}
        (folder / RESULT).write_text(json.dumps(result | {"metrics": metrics}))
        print(f"logs and checkpoints: {folder}")
        where = f"{trainer.world_size} rank(s) in {seconds:.0f} s"
        print(f"trained {epochs} epoch(s) on {where}")
        if metrics:
            print(describe(metrics), flush=True)
    return metrics


def log_result(trainer: Any, config: DictConfig, metrics: dict[str, float]) -> None:
    """A row of TensorBoard's HParams tab: the configuration, the overrides, and what was found."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from lightning_ring.tools.masking import masked

    values: Any = masked(OmegaConf.to_container(config, resolve=True))
    values["overrides"] = " ".join(map(masked, HydraConfig.get().overrides.task))
    checkpoint = trainer.checkpoint_callback
    if checkpoint and checkpoint.monitor and checkpoint.best_model_score is not None:
        metrics = metrics | {f"best/{checkpoint.monitor}": float(checkpoint.best_model_score)}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(values, metrics, trainer.global_step)
        else:
            logger.log_metrics(metrics, trainer.global_step)
        logger.finalize("success")


def model_and_data(config: DictConfig) -> tuple[Any, Any]:
    """What is trained, on what."""
    from recipes.from_configuration import FromConfiguration

    model = instantiate(
        config.model, optimizer=instantiate(config.optimizer), schedule=instantiate(config.schedule)
    )
    if isinstance(model, FromConfiguration):
        model.keep_configuration(config)
    return model, instantiate(config.data)


def test(trainer: Any, model: Any, data: Any, ckpt_path: str | None) -> dict[str, float]:
    """The metrics of all loaders of the test."""
    tested = trainer.test(model, data, ckpt_path=ckpt_path, verbose=False)
    return {name: float(value) for loader in tested for name, value in loader.items()}


def describe(metrics: dict[str, float]) -> str:
    """The metrics of a test, ``{"test/accuracy": 0.98, ...}``, in words."""
    if "test/images" in metrics:
        accuracy, images = metrics["test/accuracy"], metrics["test/images"]
        return f"test accuracy {accuracy:.4f} on {images:.0f} images"
    return "\n".join(f"{name} {value:.4f}" for name, value in metrics.items())


def main() -> None:
    """Run what the command line asks for; errors of the configuration and of the run's folder take
    one line.

    They leave this function as exceptions, because sys.excepthook has to see them to end the other
    ranks. Hydra by itself would print them and exit.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"
    folder_made, failed = False, 0

    @hydra.main(version_base="1.3", config_path="../configs", config_name="train")
    def run(config: DictConfig) -> dict[str, float] | None:
        nonlocal folder_made, failed
        folder_made = True
        try:
            return train(config)
        except (Exception, SystemExit) as end:
            if isinstance(end, SystemExit) and not end.code:
                return None  # the process that started the ranks, when they are done
            if not goes_on_after(end):
                raise
            failed += 1
            if isinstance(end, Exception):  # ranks have printed theirs
                traceback.print_exception(concise(end, folder_made))
            return None

    try:
        run()
    except Exception as error:
        raise concise(error, folder_made) from None
    if failed:
        raise SystemExit(f"Runs of the sweep that failed: {failed}. Their errors are above.")


def concise(error: Exception, folder_made: bool) -> BaseException:
    """``error`` without the frames of Hydra where its message alone says what to do, else ``error``
    as it is.

    A message alone ends this process where there are no ranks yet; they have to see the exception.
    """
    from lightning_ring.errors import ConfigurationError, RingError

    cause = error.__cause__
    if isinstance(error, InstantiationException) and cause is not None:
        return cause.with_traceback(None) if isinstance(cause, RingError) else cause
    if isinstance(error, HydraException):
        return SystemExit("\n".join(str(part) for part in (error, cause) if part))
    if isinstance(error, OSError) and not folder_made:
        return ConfigurationError(
            f"The log folder cannot be written: {error}. Give one that can be, as in "
            "hydra.run.dir=FOLDER"
        )
    if isinstance(error, RingError) and is_typed():
        return SystemExit(str(error))
    return error.with_traceback(None) if isinstance(error, RingError) else error


if __name__ == "__main__":
    main()
