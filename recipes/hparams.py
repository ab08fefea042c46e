"""TensorBoard's HParams tab: a row for each run, with its whole configuration and what the test
found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from recipes.sweep import JUDGED_BY

Value = bool | int | float | str

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SHOWN_FIRST = ("overrides", "optimizer", "optimizer.lr", "data.batch_size", "seed")
"""TensorBoard opens with five columns; the others can be ticked."""


def log_configuration(trainer: L.Trainer, config: DictConfig) -> None:
    """When a run starts: its configuration, for TensorBoard and every other logger."""
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    _write(trainer, "SESSION_START_INFO_TAG", session_start_info=_session(hyperparameters(config)))


def log_result(trainer: L.Trainer, config: DictConfig, metrics: dict[str, float]) -> None:
    """When a run has ended: the best validation, and the columns, which are those of the test's
    metrics.
    """
    checkpoint: Any = trainer.checkpoint_callback
    best = {}
    if checkpoint and checkpoint.monitor and checkpoint.best_model_score is not None:
        best = {f"best/{checkpoint.monitor}": float(checkpoint.best_model_score)}
    for logger in trainer.loggers if best else ():
        logger.log_metrics(best, step=trainer.global_step)
    judged_first = sorted({**metrics, **best}, key=lambda name: name not in JUDGED_BY)
    _write(trainer, "EXPERIMENT_TAG", experiment=_columns(hyperparameters(config), judged_first))
    for logger in trainer.loggers:
        logger.finalize("success")


def hyperparameters(config: DictConfig) -> dict[str, Value]:
    """The resolved configuration by dotted names, the option of each group, and the overrides of
    the command line.

    Lists are text; values that are null are left out.
    """
    hydra = HydraConfig.get()
    options = {
        group: option
        for group, option in hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }
    tree: Any = OmegaConf.to_container(config, resolve=True)
    values: dict[str, Any] = options | _flatten_dict(tree, delimiter=".")
    values["overrides"] = " ".join(hydra.overrides.task)
    return {
        name: value if isinstance(value, Value) else str(value)
        for name, value in values.items()
        if value is not None
    }


def names_of_all_options() -> set[str]:
    """Dotted names of the values in every option of every group.

    TensorBoard takes the columns of all runs from one of them, and runs with another optimizer have
    other values.
    """
    names: set[str] = set()
    for file in CONFIGS.glob("*/*.yaml"):
        option = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(option, dict)
        option.pop("defaults", None)
        everywhere = "@package _global_" in file.read_text()
        names |= _flatten_dict(
            option, delimiter=".", parent_key="" if everywhere else file.parent.name
        ).keys()
    return names


def _columns(values: dict[str, Value], metrics: list[str]) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    def of_type(name: str) -> Any:
        kinds = {
            bool: api_pb2.DATA_TYPE_BOOL,
            int: api_pb2.DATA_TYPE_FLOAT64,
            float: api_pb2.DATA_TYPE_FLOAT64,
        }
        return kinds.get(type(values.get(name)), api_pb2.DATA_TYPE_STRING)

    return api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=of_type(name), differs=name in SHOWN_FIRST)
            for name in sorted({*values, *names_of_all_options()})
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )


def _session(values: dict[str, Value]) -> Any:
    from tensorboard.plugins.hparams import plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo()
    for name, value in values.items():
        kind = (
            "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
        )
        setattr(info.hparams[name], f"{kind}_value", value)
    return info


def _write(trainer: L.Trainer, tag: str, **message: Any) -> None:
    """TensorBoard keeps the first message of a tag in a run."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    if not loggers or not trainer.is_global_zero:
        return
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**message))
    value = Summary.Value(tag=getattr(metadata, tag), metadata=content, tensor=metadata.NULL_TENSOR)
    for logger in loggers:
        logger.experiment._get_file_writer().add_summary(Summary(value=[value]))
