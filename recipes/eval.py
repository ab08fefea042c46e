"""python recipes/eval.py ckpt_path=FOLDER/checkpoints/best.ckpt [KEY.KEY=VALUE ...]

Builds what the run in FOLDER trained, from the configuration that it saved, and prints the metrics
of the checkpoint on the test images. Values can be changed, such as trainer.devices=4 or
data.folder=OTHER; mpirun and torchrun start it too.
"""

import sys
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

# run as a script: make `recipes` importable, instead of this folder's modules at the top level
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from recipes.train import describe, model_and_data, test


def saved_configuration(arguments: list[str]) -> DictConfig:
    """The configuration beside the checkpoint that ``arguments`` name, with their other values in
    place.

    Raises `SystemExit`: there is no such checkpoint or configuration; in one line that says so.
    """
    given = OmegaConf.from_dotlist(arguments)
    if not isinstance(given.get("ckpt_path"), str):
        raise SystemExit(__doc__)
    checkpoint = Path(given.ckpt_path)
    saved = checkpoint.absolute().parent.parent / ".hydra" / "config.yaml"
    for file in (checkpoint, saved):
        if not file.is_file():
            raise SystemExit(
                f"{file} is no file. Expected a checkpoint where recipes/train.py left it: "
                "FOLDER/checkpoints/NAME.ckpt, with the configuration of the run in FOLDER/.hydra"
            )
    config = OmegaConf.load(saved)
    OmegaConf.set_struct(config, True)  # a value that the run did not have is a mistake
    try:
        merged = OmegaConf.merge(config, given)
    except Exception as error:
        said = " ".join(str(error).split())
        raise SystemExit(f"{said}. The values of that run are in {saved}") from None
    assert isinstance(merged, DictConfig)
    merged.trainer.default_root_dir = str(saved.parent.parent)
    return merged


def main() -> None:
    config = saved_configuration(sys.argv[1:])
    model, data = model_and_data(config)
    trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    metrics = test(trainer, model, data, config.ckpt_path)
    if trainer.is_global_zero:
        print(describe(metrics), flush=True)


if __name__ == "__main__":
    main()
