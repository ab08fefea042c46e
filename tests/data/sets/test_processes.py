"""Real processes: `kill -9` in the middle of a change, and readers while a set changes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.sets.change import delete_images
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.data.shards.verify import verify
from tests.data.sets.daily import draw, images_of, pack
from tests.processes import clean_env

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat") for i in range(6)}

# Forks a child for each command and each number k, which the kernel kills at its k-th change of the disk: one process
# that has imported everything once stands for hundreds of `lightning-ring` commands.
KILLED = """
import itertools, os, shutil, signal, sys
from lightning_ring.cli.main import main
import lightning_ring.data.packing.run, lightning_ring.data.sets.merge, lightning_ring.data.sets.prune
import lightning_ring.data.sets.compact
import lightning_ring.data.sets.change, lightning_ring.data.sets.tables

CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir"}

def at_change(left):
    def hook(event, arguments):
        nonlocal left
        if event not in CHANGES or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

work, *commands = sys.argv[1:]
for number, command in enumerate(commands):
    for k in itertools.count(1, 20 if command.startswith("pack") else 4):  # all of them would take minutes
        folder = f"{work}/{number}/killed/{k}"
        shutil.copytree(f"{work}/{number}/ready", folder)
        child = os.fork()
        if not child:
            os.chdir(folder)
            sys.stdout = open(os.devnull, "w")
            at_change(k)
            os._exit(main(command.split()))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, command
            break
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    pack(draw(root / "src", NAMES), root / "dst")
    pack(draw(root / "src2", {"ant/0.jpg": 1, "ant/1.jpg": 2}), root / "other")
    draw(root / "src", {f"ant/{i}.jpg": 900 + i for i in range(6)})
    (root / "m.csv").write_text(
        "path,width,tags\n" + "".join(f'{name},{i},"[""x""]"\n' for i, name in enumerate(NAMES))
    )
    return root


COMMANDS = (
    "pack --append src dst --workers 1",
    "delete dst cat/1.jpg cat/2.jpg",
    "annotate dst m.csv",
    "merge other --into dst",
    "merge other dst --into new",
    "prune dst",
    "compact dst",
)


@pytest.mark.ranks
def test_killed_at_any_change_of_the_disk_the_old_generation_is_whole_and_the_command_can_be_given_again(
    whole, tmp_path, monkeypatch
):
    for number, command in enumerate(COMMANDS):
        shutil.copytree(whole, tmp_path / str(number) / "ready")
        if command in ("prune dst", "compact dst"):
            delete_images(tmp_path / str(number) / "ready/dst", where="class_name == 'bird'")
    result = subprocess.run([sys.executable, "-c", KILLED, tmp_path, *COMMANDS], env=clean_env(), timeout=240)
    assert result.returncode == 0
    for number, command in enumerate(COMMANDS):
        see_what_is_left(tmp_path / str(number), command.split(), monkeypatch)


def see_what_is_left(root: Path, words: list[str], monkeypatch) -> None:
    target = words[-1] if "--into" in words else "dst"
    *killed, done = sorted((root / "killed").iterdir(), key=lambda path: int(path.name))
    assert len(killed) > 2
    before = images_of(root / "ready" / target) if target == "dst" else None
    after, generation = images_of(done / target), read_manifest(done / target).generation
    is_done = []
    for folder in killed:
        there = (folder / target / "manifest.json").exists()
        assert there or before is None
        is_done.append(there and read_manifest(folder / target).generation == generation)
        if there:
            assert images_of(folder / target) == (after if is_done[-1] else before)
        monkeypatch.chdir(folder)
        assert main(words) == 0, folder
        assert read_manifest(folder / target).generation == generation
        assert images_of(folder / target) == after
        assert verify(folder / target, 1, lambda *numbers: None) == []
    if words[0] != "prune":
        assert not is_done[0]
        assert sorted(is_done) == is_done  # not yet, then done


READER = """
import hashlib, pickle, sys
from lightning_ring.data import ShardDataset
dataset = ShardDataset(sys.argv[1], decode=False)
digest = hashlib.sha256()
for i in range(len(dataset)):
    if i == 2:
        print("in the middle", flush=True)
        sys.stdin.readline()
    digest.update(dataset.read(i) + str(dataset[i][1]).encode())
worker = pickle.loads(pickle.dumps(dataset))  # as a worker that starts late
print(digest.hexdigest(), worker.generation, [dataset.name(i) for i in range(len(worker))], dataset[3] == worker[3])
"""


@pytest.mark.ranks
def test_a_reader_in_the_middle_of_an_epoch_sees_nothing_of_what_happens_to_the_set(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "set")
    root = tmp_path / "set"

    dataset = ShardDataset(root / "dst", decode=False)
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        digest.update(dataset.read(i) + str(dataset.labels[i]).encode())
    names = [dataset.name(i) for i in range(len(dataset))]
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(root / "dst")],
        env=clean_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "in the middle\n"
        pack(root / "src", root / "dst")
        main(["delete", str(root / "dst"), "cat/3.jpg", "ant/2.jpg"])
        main(["relabel", str(root / "dst"), "--where", "label == 0", "--to", "cat"])
        output, _ = reader.communicate("go on\n", timeout=120)
    finally:
        reader.kill()
        reader.wait()
    assert output == f"{digest.hexdigest()} 0 {names} True\n"
    assert ShardDataset(root / "dst").generation == 3
