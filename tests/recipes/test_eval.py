"""``recipes/eval.py``: the configuration beside a checkpoint, and the metrics that its run had."""

import sys

import pytest
from omegaconf import OmegaConf

import recipes.eval
import recipes.train


def test_checkpoint_gives_the_metrics_of_its_run_and_values_can_be_changed(
    composed, tmp_path, monkeypatch, capsys
):
    config = composed("experiment=debug")
    metrics = recipes.train.train(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    checkpoint = f"ckpt_path={tmp_path}/checkpoints/best.ckpt"
    monkeypatch.setattr(sys, "argv", ["eval.py", checkpoint])
    capsys.readouterr()
    recipes.eval.main()
    assert f"test accuracy {metrics['test/accuracy']:.4f} on 359 images" in capsys.readouterr().out
    assert recipes.eval.saved_configuration([checkpoint, "data.batch_size=8"]).data.batch_size == 8
    with pytest.raises(
        SystemExit, match=r"batch_sise.* The values of that run are in .*config\.yaml"
    ):
        recipes.eval.saved_configuration([checkpoint, "data.batch_sise=8"])


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"python recipes/eval\.py ckpt_path="):
        recipes.eval.saved_configuration([])
    for checkpoint in (tmp_path, tmp_path / "last.ckpt"):
        with pytest.raises(SystemExit, match=rf"{checkpoint} is no file.*FOLDER/checkpoints"):
            recipes.eval.saved_configuration([f"ckpt_path={checkpoint}"])
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(SystemExit, match=r"\.hydra/config\.yaml is no file"):
        recipes.eval.saved_configuration([f"ckpt_path={tmp_path}/last.ckpt"])
