"""The model of a checkpoint, made by its own class, and the size of the images that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ring.data import CenterCrop
from lightning_ring.errors import ConfigurationError


def read_checkpoint(file: Path) -> Mapping[str, Any]:
    """The checkpoint ``file`` of Lightning, on the CPU.

    Raises:
        ConfigurationError: There is none, or it cannot be read.
    """
    if not file.is_file():
        raise ConfigurationError(f"{file} is not a file. Expected a checkpoint, such as FOLDER/checkpoints/best.ckpt")
    try:
        saved = torch.load(file, map_location="cpu")
    except Exception as error:
        raise ConfigurationError(
            f"{file} cannot be read as a checkpoint ({type(error).__name__}). If it holds other objects than tensors "
            "and plain values, and you trust it, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        ) from error
    if not isinstance(saved, Mapping) or "state_dict" not in saved:
        raise ConfigurationError(f"{file} has no state_dict. Expected a checkpoint that Lightning's Trainer saved.")
    return saved


def load_model(file: Path, saved: Mapping[str, Any], class_path: str | None = None) -> tuple[nn.Module, str]:
    """The module that ``CLASS.load_from_checkpoint(file)`` returns, in evaluation mode, and the path of its class.

    Args:
        saved: What ``file`` holds.
        class_path: ``"module:Class"``, of a LightningModule. By default what the checkpoint's hyper-parameters name as
            ``_class_path`` (LightningCLI) or ``_target_`` (Hydra).

    Raises:
        ConfigurationError: The checkpoint names no class, or the class cannot be imported or does not load it.
    """
    named = saved.get("hyper_parameters", {})
    class_path = class_path or named.get("_class_path") or named.get("_target_")
    if not class_path:
        raise ConfigurationError(
            f"{file} does not name the class of its model. Give it: --model module:Class, a LightningModule that calls "
            "save_hyperparameters()."
        )
    found = _imported(class_path)
    try:
        return found.load_from_checkpoint(file, map_location="cpu").eval(), class_path
    except Exception as error:  # of the user's class: anything
        raise ConfigurationError(
            f"{class_path}.load_from_checkpoint({str(file)!r}) failed ({in_one_line(error)}). It needs the "
            "class that was trained, and its arguments in the checkpoint: save_hyperparameters()."
        ) from error


def evaluation_crop(file: Path, saved: Mapping[str, Any], size: int | None, resize: int | None) -> CenterCrop:
    """The crop to ``size`` pixels a side, out of an image whose shorter side is resized to ``resize``.

    By default both are ``image_size`` and ``resize`` of the data module's hyper-parameters. Where ``size`` alone is
    given, ``resize`` is the same.

    Raises:
        ConfigurationError: The checkpoint does not say.
    """
    data = saved.get("datamodule_hyper_parameters", {})
    if size is None:
        size = data.get("image_size")
        resize = data.get("resize") if resize is None else resize
    if size is None:
        raise ConfigurationError(
            f"{file} does not say how large the images of its model are. Give their side in pixels: --size 224, and "
            "with --resize 256 the shorter side that a photograph is resized to before its centre is cut out."
        )
    return CenterCrop(size, resize=size if resize is None else resize)


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _imported(class_path: str) -> Any:
    module, _, name = class_path.rpartition(":" if ":" in class_path else ".")
    try:
        found: Any = reduce(getattr, name.split("."), import_module(module))
    except Exception as error:  # of the user's module: anything
        raise ConfigurationError(
            f"{class_path} cannot be imported ({in_one_line(error)}). Expected module:Class, in a "
            "folder where the module can be imported."
        ) from error
    if not hasattr(found, "load_from_checkpoint"):
        raise ConfigurationError(f"{class_path} has no load_from_checkpoint. Expected the class of a LightningModule.")
    return found
