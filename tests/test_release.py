"""What a release ships: the sdist and the wheel, public names with documentation and types, and
README's script, trained from an installed wheel.
"""

import email
import importlib
import inspect
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_ring
from tests.processes import ROOT, WHOLE_LINES, run

DOCS = ROOT / "docs"
ROOMS = dict(
    re.findall(
        r"^\| `(lightning_ring[\w.]*)` \| (.+) \|$",
        (DOCS / "compatibility.md").read_text(),
        re.MULTILINE,
    )
)
"""Public modules, and the links to their reference pages."""
MAX_WHEEL_BYTES = 700_000
NOT_SHIPPED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "logs", "outputs", "site"
)


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_documented(room):
    module = importlib.import_module(room)
    pages = [(DOCS / page).read_text() for page in re.findall(r"\((\S+?)\)", ROOMS[room])]
    written = set(re.findall(r"\w+", "\n".join(pages)))
    # mkdocstrings shows the classes and functions of the room
    shows_room = any(f"::: {room}\n" in page and "members:" not in page for page in pages)
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        has_docstring = inspect.isclass(value) or inspect.isroutine(value)
        assert name in written or (shows_room and has_docstring), f"{name} is on no reference page"
        if has_docstring:
            assert value.__doc__, f"{name} has no docstring"
            # a dataclass without a docstring gets its signature
            assert not value.__doc__.startswith(f"{name}(")


def test_every_reference_page_is_of_a_public_room():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.glob("reference/*.md")}
    assert pages == set(re.findall(r"reference/\w+\.md", "\n".join(ROOMS.values())))


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder with the sdist and the wheel of this checkout."""
    checkout = tmp_path_factory.mktemp("release") / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_SHIPPED)
    folder = checkout / "dist"
    python = [sys.executable, "-m"]
    built = run([*python, "build", "--no-isolation", "--outdir", str(folder), str(checkout)])
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory):
    """Python of an environment with the wheel; its dependencies are those of this one."""
    environment = tmp_path_factory.mktemp("installed")
    made = run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    assert made.returncode == 0, made.stdout
    (site,) = environment.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    done = run([*pip, "--target", str(site), *map(str, release.glob("*.whl"))])
    assert done.returncode == 0, done.stdout
    # Python reads no `.pth` file in these folders, so that the link to the checkout, which an
    # editable installation leaves there, has no effect.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    return environment / "bin" / "python"


@pytest.mark.ranks
def test_twine_accepts_the_release(release):
    files = sorted(map(str, release.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    checked = run([sys.executable, "-m", "twine", "check", "--strict", *files])
    assert checked.returncode == 0, checked.stdout


@pytest.mark.ranks
def test_wheel_holds_the_package_alone(release):
    (wheel,) = release.glob("*.whl")
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(metadata))
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lightning_ring").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    folder = metadata.rpartition("/")[0]
    assert {name for name in names if not name.startswith(f"{folder}/")} == package
    assert said["Version"] == lightning_ring.__version__
    assert f"version: {said['Version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert "Project-URL" not in said


@pytest.mark.ranks
def test_installed_wheel_trains_the_script_of_readme(installed, tmp_path, monkeypatch):
    script = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)[0]
    trained = tmp_path / "train.py"
    trained.write_text(f"{script}    print(trainer.global_step, lightning_ring.__file__)\n")
    monkeypatch.chdir(tmp_path)
    done = run([str(installed), str(trained)], PYTHONPATH=WHOLE_LINES)
    assert done.returncode == 0, done.stdout
    # 64 samples, one at a time, on two ranks
    home = installed.parent.parent / "lib"
    assert len(re.findall(rf"^32 {home}\S+$", done.stdout, re.MULTILINE)) == 2, done.stdout


@pytest.mark.ranks
def test_installed_wheel_passes_a_strict_type_checker(installed, tmp_path, monkeypatch):
    for room in ROOMS:
        names = importlib.import_module(room).__all__
        lines = [f"from {room} import {name}\nreveal_type({name})\n" for name in names]
        (tmp_path / f"uses_{room.replace('.', '_')}.py").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed)]
    checked = run([*mypy, *map(str, tmp_path.glob("uses_*.py"))], PYTHONPATH="")
    assert checked.returncode == 0, checked.stdout
    assert 'Revealed type is "Any"' not in checked.stdout
    assert "Revealed type is" in checked.stdout
