"""What the argument and the environment may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.options import RingOptions
from lightning_ring.timeline.settings import timeline_settings


def test_the_argument_counts_more_than_the_environment(tmp_path: Path) -> None:
    environ = {"RING_TIMELINE": str(tmp_path / "env.json"), "RING_TIMELINE_MAX_MB": "3.5"}
    assert timeline_settings(None, {}).path is None
    assert timeline_settings(None, environ).path == tmp_path / "env.json"
    settings = timeline_settings(tmp_path / "new" / "folder" / "argument.json", environ)
    assert settings.path == tmp_path / "new" / "folder" / "argument.json"
    assert settings.max_mb == 3.5
    assert not (tmp_path / "new").exists(), "nothing is made before training"


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert timeline_settings("~/t.json", {}).path == tmp_path / "t.json"
    settings = timeline_settings(
        None, {"RING_TIMELINE": "~/t.json", "RING_TIMELINE_SWITCH": "~/on"}
    )
    assert (settings.path, settings.switch) == (tmp_path / "t.json", tmp_path / "on")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "ends in .json"),
        (True, "ends in .json"),
        ("trace", "ends in .json"),
        ("trace.txt", "ends in .json"),
        ("{tmp}/folder.json", "exists and was not written as a timeline"),
        ("{tmp}/mine.json", "exists and was not written as a timeline"),
    ],
)
def test_a_path_that_cannot_work_is_an_error_when_the_strategy_is_built(
    tmp_path, value, message
) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "mine.json").write_text('{"precious": 1}')
    value = value.format(tmp=tmp_path) if isinstance(value, str) else value
    with pytest.raises(ConfigurationError, match=message) as caught:
        RingOptions(timeline=value)
    assert f"timeline={value!r}" in str(caught.value)
    if isinstance(value, str):
        with pytest.raises(ConfigurationError, match=f"RING_TIMELINE is '.*{message}"):
            timeline_settings(None, {"RING_TIMELINE": value})


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_a_size_that_cannot_work(size: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RING_TIMELINE_MAX_MB is '{size}'"):
        timeline_settings(None, {"RING_TIMELINE_MAX_MB": size})


def test_a_switch_without_a_timeline() -> None:
    with pytest.raises(
        ConfigurationError, match="RING_TIMELINE_SWITCH is '/tmp/on', but no timeline is asked for"
    ):
        timeline_settings(None, {"RING_TIMELINE_SWITCH": "/tmp/on"})
