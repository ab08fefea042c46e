"""Metadata of images, and filters over it, against plain Python."""

from __future__ import annotations

import csv
import pickle
from typing import Any

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset, ShuffledSampler, image_loader
from lightning_ring.data.loading.transforms import CenterCrop
from lightning_ring.data.sets.change import annotate_images, delete_images
from lightning_ring.data.sets.tables import read_table
from lightning_ring.data.shards import expressions
from lightning_ring.data.shards.files import ShardFiles
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.sets.daily import draw, pack

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat", "horse") for i in range(10)}
KINDS = {"width": "number", "camera": "text", "tags": "texts", "ids": "numbers", "boxes": "boxes"}


def row_of(name: str, class_name: str = "") -> dict[str, Any]:
    """Every third image has no width, no camera, no list."""
    i = int(name.split("/")[1][:-4])
    return {
        "width": None if i % 3 == 2 else 100 * i + 0.5,
        "camera": None if i % 3 == 1 else f'{i % 4:03d}, "é"',
        "tags": [] if i % 3 == 0 else ["night", f"t{i}"][: i % 3],
        "ids": None if i % 3 == 0 else [i, 2**40 + i],
        "boxes": [[0, 1, i, i + 0.25]] * (i % 3),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.mktemp("set")
    pack(draw(root / "src", NAMES), root / "dst")
    annotate_images(root / "dst", row_of)
    return root / "dst"


def check_values(dataset: ShardDataset) -> None:
    for i in range(len(dataset)):
        row = row_of(dataset.name(i))
        found = {name: column[i] for name, column in dataset.metadata.items()}
        assert found["width"] == row["width"] or (np.isnan(found["width"]) and row["width"] is None)
        assert found["camera"] == (row["camera"] or "")
        assert found["tags"] == row["tags"]
        assert found["ids"].tolist() == (row["ids"] or [])
        np.testing.assert_array_equal(found["boxes"], np.array(row["boxes"], np.float32).reshape(-1, 4))


def test_every_kind_comes_back_as_it_was_given(target):
    dataset = ShardDataset(target)
    assert {name: column.kind for name, column in dataset.metadata.items()} == KINDS
    check_values(dataset)
    check_values(ShardDataset(target, where="'night' in tags or label == 1"))
    check_values(pickle.loads(pickle.dumps(ShardDataset(target, where="not missing(ids)"))))


def python_rows(target):
    dataset = ShardDataset(target, decode=False)
    for i in range(len(dataset)):
        name = dataset.name(i)
        row = row_of(name)
        yield row | {
            "name": name,
            "label": int(dataset.labels[i]),
            "class_name": dataset.classes[dataset.labels[i]],
            "bytes": len(dataset.read(i)),
            "width": float("nan") if row["width"] is None else row["width"],
            "camera": row["camera"] or "",
            "ids": row["ids"] or [],
            "missing": lambda value: not value if isinstance(value, (str, list)) else value != value,
            "startswith": str.startswith,
            "endswith": str.endswith,
            "contains": str.__contains__,
            "matches": lambda text, pattern: __import__("re").search(pattern, text) is not None,
        }


EXPRESSIONS = [
    "width > 300",
    "300 < width <= 700.5",
    "width != 100.5",
    "not (width > 300 or class_name == 'cat')",
    "class_name in ('cat', 'bird') and bytes > 1000",
    "class_name not in ['cat']",
    "label in (0, 2)",
    "'night' in tags",
    "'night' not in tags and len(tags) == 0",
    "5 in ids",
    "len(boxes) >= 1",
    "missing(width) or missing(camera)",
    "missing(tags)",
    "startswith(name, 'cat/') and endswith(name, '3.jpg')",
    "matches(name, r'/[2-4]\\.jpg$')",
    "contains(camera, 'é')",
    "'01' in camera",
    "camera < '002'",
    "camera == class_name",
    "bytes / 1024 * 2 - 1 > width % 7 + label",
    "-label < -1",
    "len(name) == 9",
    "'cat' == class_name",
    "3 > label >= 1",
]


@pytest.mark.parametrize("where", EXPRESSIONS)
@pytest.mark.parametrize("at_once", [7, 1 << 18])
def test_filters_say_what_python_says(target, where, at_once, monkeypatch):
    monkeypatch.setattr(expressions, "_AT_ONCE", at_once)
    monkeypatch.setattr(ShardFiles, "read", lambda *arguments: pytest.fail("a filter read an image"))
    dataset = ShardDataset(target, where=where)
    found = [dataset.name(i) for i in range(len(dataset))]
    monkeypatch.undo()
    # the oracle: Python's own semantics of these words, row by row
    expected = [row["name"] for row in python_rows(target) if eval(where, {"len": len}, row)]
    assert found == expected
    assert dataset.labels.tolist() == [row["label"] for row in python_rows(target) if row["name"] in set(expected)]


def test_the_filters_above_tell_images_apart(target):
    counts = [len(ShardDataset(target, where=where)) for where in EXPRESSIONS]
    assert sum(0 < count < 30 for count in counts) >= len(EXPRESSIONS) - 3


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("width >", "it is no expression"),
        ("widht > 3", "there is no 'widht'; the index has name, label, class_name, bytes, boxes, camera"),
        ("width", "it is not true or false for an image"),
        ("class_name > 3", "compares unlike things"),
        ("width in tags", "looks for unlike things"),
        ("width == 3 and label", "`label` is not true or false"),
        ("class_name + 3 > 2", "`class_name` is no number"),
        ("name.upper() == 'X'", "is not understood"),
        ("__import__('os').system('true')", "is not understood"),
        ("[x for x in (1, 2)]", "is not understood"),
        ("(lambda: True)()", "is not understood"),
        ("len.__class__", "is not understood"),
        ("eval('1') == 1", "is not understood"),
        ("matches(name, '(')", "no regular expression"),
        ("9 ** 9 ** 9 > width", "is not understood"),
        ("(" * 300 + "1" + ")" * 300, "it is no expression"),
        ("1 < 2", "compares unlike things"),
        ("(width > 3) + 1 > 0", "is no number"),
        (f"width + 1{'0' * 400} > 0", "cannot be computed"),
        ("not " * 700 + "label == 1", "cannot be computed|it is no expression"),
    ],
)
def test_what_is_no_filter_is_an_error_and_runs_nothing(target, where, message):
    with pytest.raises(ConfigurationError, match=message):
        ShardDataset(target, where=where)


def test_a_division_by_zero_is_no_number(target):
    assert len(ShardDataset(target, where="label < 1 / 0")) == 30
    assert len(ShardDataset(target, where="label > 1 % 0 or bytes / (label - label) == 3")) == 0


def test_each_text_is_looked_at_once_however_many_there_are(target, tmp_path, monkeypatch):
    pack(target.parent / "src", tmp_path / "dst")
    annotate_images(tmp_path / "dst", lambda name, class_name: {"note": f"of {name}", "notes": [name, f"b {name}"]})
    looked = []
    monkeypatch.setattr(expressions, "_AT_ONCE", 7)
    monkeypatch.setitem(expressions._TEXT_FUNCTIONS, "contains", lambda text, part: looked.append(text) or part in text)
    assert len(ShardDataset(tmp_path / "dst", where="contains(note, 'cat/')")) == 10
    assert len(looked) == len(set(looked)) == 30
    assert len(ShardDataset(tmp_path / "dst", where="'b cat/3.jpg' in notes")) == 1
    assert len(ShardDataset(tmp_path / "dst", where="len(note) == 13")) == 10


def test_a_filtered_data_set_is_one_of_its_own(target):
    whole, some = ShardDataset(target, decode=False), ShardDataset(target, where="class_name == 'cat'", decode=False)
    assert len(some) == 10
    assert some.fingerprint not in (whole.fingerprint, ShardDataset(target, where="class_name == 'bird'").fingerprint)
    assert some.fingerprint == ShardDataset(target, where="label == 1").fingerprint
    assert some[3] == some[3 - 10] == some.__getitems__([3])[0]
    for wrong in (10, -11):
        with pytest.raises(IndexError, match=f"image {wrong} of 10"):
            some[wrong]
    loader = image_loader(
        ShardDataset(target, where="class_name == 'cat'"),
        ShuffledSampler(10, rank=0, world_size=1),
        4,
        crop=CenterCrop(8, resize=8),
        transform=None,
    )
    assert [label for _, labels in loader for label in labels.tolist()] == [1] * 10
    assert len(ShardDataset(target, where="label == 77")) == 0


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_give_what_the_function_gave(target, tmp_path, kind):
    pack(target.parent / "src", tmp_path / "dst")
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{"path": name, **row_of(name)} for name in NAMES]
        rows = [{**row, "path": f"./{row['path']}", "Label": "not a column"} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "m.parquet")
    else:
        with open(tmp_path / "m.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Path", *KINDS, "LABEL"])
            for name in NAMES:
                row = row_of(name)
                cells = ["" if row[column] in (None, []) else row[column] for column in KINDS]
                writer.writerow([f"./{name}", *(str(cell).replace("'", '"') for cell in cells), "x"])
    assert main(["annotate", str(tmp_path / "dst"), str(tmp_path / f"m.{kind}")]) == 0
    dataset = ShardDataset(tmp_path / "dst")
    assert dataset.metadata.keys() == KINDS.keys()
    check_values(dataset)


def test_what_ls_writes_annotate_reads(target, tmp_path, capsys):
    assert main(["ls", str(target)]) == 0
    (tmp_path / "table.csv").write_text(capsys.readouterr().out)
    pack(target.parent / "src", tmp_path / "dst")
    assert main(["annotate", str(tmp_path / "dst"), str(tmp_path / "table.csv")]) == 0
    check_values(ShardDataset(tmp_path / "dst"))
    assert read_manifest(tmp_path / "dst").generation == 1
    assert main(["annotate", str(tmp_path / "dst"), str(tmp_path / "table.csv")]) == 0
    assert read_manifest(tmp_path / "dst").generation == 1  # it has these values
    assert main(["ls", str(target), "--where", "label == 1", "--columns", "tags", "--limit", "2"]) == 0
    assert capsys.readouterr().out.count("cat/") == 2
    assert main(["ls", str(target), "--columns", "no"]) == 2
    with pytest.raises(SystemExit):
        main(["ls", str(target), "--limit", "-1"])
    assert "-1: expected 0 or more" in capsys.readouterr().err


def test_later_images_miss_values_and_further_annotations_add_to_them(target, tmp_path):
    source = draw(tmp_path / "src", {"cat/0.jpg": 1, "cat/1.jpg": 2})
    pack(source, tmp_path / "dst")
    annotate_images(tmp_path / "dst", {"width": {"cat/0.jpg": 5, "cat/1.jpg": 6}, "tags": {"cat/1.jpg": ["a"]}})
    pack(draw(source, {"cat/2.jpg": 3, "dog/3.jpg": 4}), tmp_path / "dst")
    annotate_images(tmp_path / "dst", {"tags": {"dog/3.jpg": ["b", "a"]}, "place": {"cat/0.jpg": "Rome"}})
    delete_images(tmp_path / "dst", names=["cat/1.jpg"])
    dataset = ShardDataset(tmp_path / "dst")
    rows = {
        dataset.name(i): [dataset.metadata[name][i] for name in ("width", "tags", "place")] for i in range(len(dataset))
    }
    assert str(rows["cat/2.jpg"]) == str([float("nan"), [], ""])
    assert str(rows["dog/3.jpg"]) == str([float("nan"), ["b", "a"], ""])
    assert rows["cat/0.jpg"] == [5, [], "Rome"]
    assert len(ShardDataset(tmp_path / "dst", where="missing(width)")) == 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"w": {"cat/0.jpg": 3, "cat/1.jpg": "x"}},
            r"the column 'w' holds number \(3\), text \('x'\)\. Expected one kind",
        ),
        ({"w": {"cat/0.jpg": 2**60}}, r"1152921504606846976 is no value of a column of number.*2\^53"),
        ({"w": {"cat/0.jpg": [[1, 2, 3]]}}, "four numbers a box"),
        ({"w": {"cat/0.jpg": ["a", 3]}}, "3 is no value of a column of texts"),
        ({"w": {"cat/0.jpg": {"a": 1}}}, "the column 'w' holds dict"),
        ({"w": {"no.jpg": 1}}, "the set has no image 'no.jpg'"),
        ({"a b": {"cat/0.jpg": 1}}, "'a b' is no name of a column"),
        ({"label": {"cat/0.jpg": 1}}, "'label' is no name of a column"),
        ({"class": {"cat/0.jpg": 1}}, "'class' is no name of a column: .* no word of Python's"),
        ({"Width": {"cat/0.jpg": 1}}, "the columns 'Width' and 'width', which some file systems take for one"),
    ],
)
def test_wrong_metadata_says_what_is_expected_and_changes_nothing(target, columns, message):
    generation = read_manifest(target).generation
    with pytest.raises(ConfigurationError, match=message):
        annotate_images(target, columns)
    assert read_manifest(target).generation == generation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,w\na,1\n", r"has the columns \['name', 'w'\]\. Expected `path`"),
        ("path,w,w\na,1,2\n", "each once"),
        ("path,w\na,1\na,2\n", "has 'a' twice"),
        ("path,w\n,1\n", "has a row without a path"),
        ("path,w\na,1,2\n", "row 1 has 3 cells, expected 2"),
        ("path,label\na,x\n", "has no column besides path and label"),
    ],
)
def test_a_wrong_table_says_what_is_expected(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_table(tmp_path / "t.csv")


def test_numbers_that_are_none_stay_text(tmp_path):
    (tmp_path / "t.csv").write_text("path,zip,big,mixed\na,00123,1152921504606846977,1\nb,,2,x\n")
    assert read_table(tmp_path / "t.csv") == {
        "zip": {"a": "00123", "b": None},
        "big": {"a": "1152921504606846977", "b": "2"},
        "mixed": {"a": "1", "b": "x"},
    }


@pytest.mark.parametrize("name", ["width.npy", "camera.npy", "camera.json", "tags.ends.npy", "boxes.npy"])
def test_no_changed_byte_of_metadata_is_read_silently(target, tmp_path, name):
    path = target / read_manifest(target).index / "columns" / name
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ShardError, match="is not as it was packed"):
            ShardDataset(target, where="width > 3")
        with pytest.raises(ShardError, match="is not as it was packed"):
            ShardDataset(target).metadata["width"]
    finally:
        path.write_bytes(data)
