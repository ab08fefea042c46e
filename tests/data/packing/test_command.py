"""``lightning-ring pack`` as a command."""

import pytest

from lightning_ring.cli.pack import main
from lightning_ring.errors import ConfigurationError
from tests.data.packing.packed import contents


def test_the_command_packs_verifies_and_explains(source, packed, tmp_path, capsys):
    target = str(tmp_path / "dst")
    assert (
        main([str(source), target, "--size", "40", "--shard-mb", str(16 / 1024), "--workers", "3"])
        == 0
    )
    assert contents(tmp_path / "dst") == contents(packed)
    output = capsys.readouterr().out
    assert "38 images of 4 classes" in output
    assert "left out: 2, listed in" in output
    assert main(["--verify", target]) == 0
    assert "38 images in 8 shards, all as they were packed" in capsys.readouterr().out
    shard = tmp_path / "dst" / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    assert main(["--verify", target]) == 1
    assert f"{shard} is cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["src"], "expected SRC and DST, got 1 path"),
        (["--verify", "a", "b"], "expected DST alone, got 2 paths"),
        (["--verify", "a", "--workers", "0"], "--workers 0: expected 1 or more"),
        (["src", "dst", "--size", "-1"], "--size -1: expected pixels"),
        (["src", "dst", "--shard-mb", "0"], "--shard-mb 0.0: expected MiB"),
        (["src", "dst", "--quality", "101"], "--quality 101: expected"),
    ],
)
def test_wrong_command_lines_say_what_is_expected(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        main(arguments)
