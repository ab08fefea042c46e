"""What is listed for packing: image folders and CSVs, good and bad."""

import pytest
from torchvision.datasets import ImageFolder

from lightning_ring.data.packing.sources import list_sources, scan_folder
from tests.data.photos import image_folder
from tests.refusals import refused


def pairs(sources):
    return [(str(sources.path(i)), sources.label(i)) for i in range(len(sources))]


def test_a_folder_is_listed_as_image_folder_lists_it(tmp_path):
    root = image_folder(tmp_path / "src")
    (root / "class 1" / "more, é-").mkdir()  # sorts before "more, é/...", though its name is longer
    (root / "class 1" / "more, é-" / "x.png").touch()
    (root / "class 1" / "more, é" / "deep").mkdir()
    (root / "class 1" / "more, é" / "deep" / "x.JPEG").touch()
    sources = list_sources(root, True)
    expected = ImageFolder(str(root))
    assert sources.classes == expected.classes
    assert pairs(sources) == expected.samples


def test_by_default_classes_are_mixed_always_the_same_way(tmp_path):
    root = image_folder(tmp_path / "src")
    mixed, again = (pairs(list_sources(root, group_by_class=False)) for _ in range(2))
    assert mixed == again
    assert sorted(mixed) == sorted(ImageFolder(str(root)).samples)
    assert len({label for _, label in mixed[:8]}) == 3


def test_everything_else_in_a_folder_is_reported(tmp_path):
    root = image_folder(tmp_path / "src", classes=1, images=2)
    (root / "README.txt").touch()
    (root / "class 0" / "labels.xml").touch()
    (root / ".cache").mkdir()
    sources = list_sources(root, True)
    assert len(sources) == 2
    rows = sources.report.decode().splitlines()
    assert sources.left_out == len(rows) == 3
    assert rows[0] == "left out,.cache,a hidden folder is no class"
    assert rows[1] == "left out,README.txt,not in a class folder"
    assert rows[2].startswith("left out,class 0/labels.xml,its extension is none of .jpg")
    (root / "class 0" / "again").symlink_to(root)
    with refused("again is a link to a folder that it is in"):
        list(scan_folder(root))


def test_a_csv_lists_paths_from_its_folder(tmp_path):
    (tmp_path / "x").mkdir()
    file = tmp_path / "x" / "train.csv"
    file.write_text(
        '\ufeffid,Label,path\n1,dog,"a, b.jpg"\n2,cat,/there/c.gif\n\n', encoding="utf-8"
    )
    sources = list_sources(file, True)
    assert sources.classes == ["cat", "dog"]
    assert pairs(sources) == [("/there/c.gif", 0), (str(tmp_path / "x" / "a, b.jpg"), 1)]


def test_numbers_as_labels_stay_what_they_are(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("path,label\n" + "".join(f"{i}.jpg,{i}\n" for i in range(12)))
    assert [label for _, label in pairs(list_sources(file, True))] == list(range(12))


def test_rows_without_label_are_reported_by_line(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("path,label\na.jpg,x\nb.jpg,\nc.jpg\n,x\nd.jpg,y\n")
    sources = list_sources(file, True)
    assert [path for path, _ in pairs(sources)] == [
        str(tmp_path / "a.jpg"),
        str(tmp_path / "d.jpg"),
    ]
    assert sources.report.decode().splitlines() == [
        "left out,b.jpg,line 3 of train.csv has no label",
        "left out,c.jpg,line 4 of train.csv has no label",
        "left out,train.csv,line 5 of train.csv has no path",
    ]


def test_two_spellings_of_a_path_are_one_image(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("path,label\n./a.jpg,x\nd//b.jpg,y\nd/../b.jpg,y\n/a.jpg,y\n")
    sources = list_sources(file, True)
    assert [sources.name(i) for i in range(len(sources))] == [
        "a.jpg",
        "d/b.jpg",
        "d/../b.jpg",
        "/a.jpg",
    ]
    with open(file, "a") as text:
        text.write("d/./b.jpg,y\n")
    with refused(r"lists 'd/b\.jpg' twice\. Give each image one"):
        list_sources(file, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"starts with the columns \[\], expected path and label"),
        ("a.jpg,cat\n", r"starts with the columns \['a.jpg', 'cat'\], expected path and label"),
        ("path,label\n", "lists no image"),
        (
            "path,label\na.jpg,\n",
            r"lists no image. .*CSV file .*\nleft out,a.jpg,line 2 of train.csv has no label",
        ),
        (
            "path,label\na.jpg,x\nb.jpg,x\na.jpg,y\n",
            "lists 'a.jpg' twice",
        ),
        ("path,label\na.jpg,Cat\nb.jpg,cat\n", "two classes of one name, 'Cat' and 'cat'"),
        ("path,label\na.jpg,1\nb.jpg,01\n", "two classes of one name, '1' and '01'"),
        ("path,label\na.jpg,caf\u00e9\nb.jpg,cafe\u0301\n", "two classes of one name"),
    ],
)
def test_what_cannot_be_listed_says_why(tmp_path, text, message):
    file = tmp_path / "train.csv"
    file.write_text(text, encoding="utf-8")
    with refused(message):
        list_sources(file, True)
