"""A set that is packed again: by the same command, by another one, from a source that has
changed.
"""

import pytest

from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.errors import ConfigurationError
from tests.data.packing.packed import SETTINGS, contents, pack, pack_until
from tests.data.photos import encode, photo


def test_packing_again_does_nothing(source, packed):
    before = {path: path.stat().st_mtime_ns for path in packed.rglob("*")}
    assert ShardDataset(packed).fingerprint == f"generation 0, {pack(source, packed).fingerprint}"
    assert {path: path.stat().st_mtime_ns for path in packed.rglob("*")} == before


def test_another_command_for_the_same_folder_is_an_error(source, packed, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"packed already with another command: size 40, now 50\."
    ):
        pack(source, packed, PackSettings(size=50, shard_mb=SETTINGS.shard_mb))
    pack_until(1, source, tmp_path / "dst")
    with pytest.raises(
        ConfigurationError, match="half packed with another command: quality 90, now 80"
    ):
        pack(
            source, tmp_path / "dst", PackSettings(size=40, shard_mb=SETTINGS.shard_mb, quality=80)
        )


def csv_of(folder, labels):
    """``labels``: by photo. Each has another picture."""
    for i in range(len(labels)):
        if not (folder / f"{i}.jpg").exists():
            (folder / f"{i}.jpg").write_bytes(encode(photo(i, 60, 40)))
    (folder / "train.csv").write_text(
        "path,label\n" + "".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels))
    )
    return folder / "train.csv"


@pytest.mark.parametrize("half", [True, False])
def test_a_source_that_has_changed_is_an_error(tmp_path, half):
    file = csv_of(tmp_path, "abab" * 5)
    if half:
        pack_until(20, file, tmp_path / "dst")
        assert list((tmp_path / "dst").glob("*.tar"))
    else:
        pack(file, tmp_path / "dst")
    before = contents(tmp_path / "dst")
    state = "half packed" if half else "packed already"

    def refused():
        with pytest.raises(
            ConfigurationError, match=f"(?s)is {state}, and .* has changed since.*Nothing was"
        ):
            pack(file, tmp_path / "dst")
        assert contents(tmp_path / "dst") == before

    for labels in ("baba" * 5, "abab" * 5 + "a", "abab" * 4):
        csv_of(tmp_path, labels)
        refused()
    csv_of(tmp_path, "abab" * 5)
    (tmp_path / "3.jpg").write_bytes(encode(photo(99, 60, 40)))
    refused()


def test_a_source_that_changed_before_its_first_shard_is_packed_as_it_is_now(tmp_path):
    file = csv_of(tmp_path, "abab")
    pack_until(4, file, tmp_path / "dst", PackSettings())
    csv_of(tmp_path, "cccb")
    pack(file, tmp_path / "dst", PackSettings())
    dataset = ShardDataset(tmp_path / "dst")
    assert {dataset.name(i): dataset.classes[dataset.labels[i]] for i in range(4)} == {
        f"{i}.jpg": label for i, label in enumerate("cccb")
    }
