"""Parsers of files and messages that others may have written, given mutations of whole ones: only
documented errors, at most a second of work and 256 MiB each.

python -m tests.mutations --count 100000            # all parsers
python -m tests.mutations --parser manifest --first 1234 --count 1
"""

import argparse
import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from random import Random
from unittest.mock import patch

from jinja2 import Environment
from markupsafe import Markup
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_ring.data import ShardDataset
from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.packing.run import pack
from lightning_ring.data.shards import MANIFEST, Manifest, Shard, file_sha256
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.job.watch.messages import parse
from lightning_ring.launch.hosts import parse_hosts, read_hostfile
from lightning_ring.timeline.trace_files import TraceFile, merge, rank_file
from tests.images import write_folder

SECONDS = 1.0
MOST_BYTES = 256 * 2**20
_HANGS = 20  # seconds
_STRANGE = (
    *(None, True, -1, 0, 2**31, 2**63, 10**4000, 1e308, float("nan"), float("inf"), "", "x", "²"),
    *("../../evil", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, [], {}, [[]], {"a": {"b": 1}}),
)
_PIECES = (
    *(b"", b"\0", b"\xff", b"\n", b"{", b"]", b'"', b":", b"-", b"..", b"/", b"&a *a", b"!!int "),
    *(b"1e999", b"NaN", b"9" * 25, b"\\ud800", b"\\U99999999", b"\xc3\x28", b"[" * 2000),
)


# -- mutations


def mutated(data, random):
    """``data`` with one to four changes: of a value, if it is JSON, or of its bytes."""
    with suppress(ValueError, RecursionError):
        if random.random() < 0.5:
            lines = data.split(b"\n") if b'"otherData"' in data or b'"kind"' in data else [data]
            number = random.randrange(len(lines))
            lines[number] = json.dumps(_changed(json.loads(lines[number]), random)).encode()
            return b"\n".join(lines)
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(data) + 1)
        stop = min(len(data), start + random.choice((0, 1, 1, 2, 8, 100)))
        other = random.randrange(len(data) + 1)
        data = data[:start] + random.choice(
            (
                random.choice(_PIECES) + data[stop:],
                bytes([random.randrange(256)]) + data[stop:],
                random.randbytes(4) + data[stop:],
                data[start:stop] * random.choice((2, 3, 50)) + data[stop:],
                data[other : other + 40] + data[stop:],
                b"",
            )
        )
    return data


def _changed(value, random):
    """A copy, in which a value, or the name of one, is another."""
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.1:
        return random.choice(_STRANGE)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = random.choice(keys)
    copy = value.copy()
    action = random.random()
    if action < 0.1:
        del copy[key]
    elif action < 0.25 and isinstance(copy, dict):
        copy[str(random.choice(_STRANGE))[:5000]] = copy.pop(key)
    else:
        copy[key] = _changed(value[key], random)
    return copy


def _events_mutated(data, random):
    """TensorBoard's file of events with one event mutated, and the right checksum of it."""
    records, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        records.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    number = random.randrange(len(records))
    records[number] = mutated(records[number], random)
    writer = RecordWriter(BytesIO())
    for record in records:
        writer.write(record)
    return writer._writer.getvalue()


# -- parsers


@dataclass(frozen=True)
class Parser:
    """``write`` makes whole files in a folder, of which those that match ``files`` are mutated one
    at a time; ``read`` reads the folder and may raise ``errors``.
    """

    write: Callable
    files: str
    read: Callable
    errors: tuple = ()


def _write_shards(folder):
    source = write_folder(folder / "src", classes=2, images=3, size=(8, 8))
    pack(source, folder / "dst", PackSettings(shard_mb=4 / 1024), 1, lambda *numbers: None)


def _read_shards(folder):
    """With checksums that fit, as somebody would write them who means harm, or as it is."""
    root = folder / "dst"
    path = root / MANIFEST
    whole = path.read_bytes()
    if len(whole) % 4 == 0:
        return _read_everything(root)
    try:
        with suppress(Exception):
            fields = json.loads(whole)
            for name in fields["files"].keys() & {str(p.relative_to(root)) for p in _index(root)}:
                fields["files"][name] = file_sha256(root / name)
            shards = [Shard(**shard) for shard in fields["shards"]]
            manifest = Manifest(fields["classes"], shards, fields["files"], "", "", {}, {})
            path.write_text(json.dumps(fields | {"fingerprint": manifest.fingerprint}))
        _read_everything(root)
    finally:
        path.write_bytes(whole)


def _index(root):
    return root.glob("index/*/*")


def _read_everything(root):
    images = ShardDataset(root, decode=False)
    for i in range(min(100, len(images))):
        assert images.name(i) is not None
        images[i]
    assert len(images._index.column("stamps")) == len(images)


def _write_messages(folder):
    messages = [
        {"kind": "hello", "token": "0123456789abcdef", "rank": 1, "pid": 4711, "host": "node-1"},
        {"kind": "failed", "rank": 3, "error": "ValueError: é", "stacks": ["a", "b"], "at": 1.5},
    ]
    (folder / "messages").write_text("\n".join(map(json.dumps, messages)))


def _read_messages(folder):
    for line in (folder / "messages").read_bytes().split(b"\n"):
        message = parse(line)
        assert message is None or isinstance(message["kind"], str)


def _write_hosts(folder):
    lines = ["# two hosts", "gpu01 slots=4", "user@gpu-02.example.org:8  # with more", "", "node3"]
    (folder / "hosts").write_text("\n".join(lines))


def _read_hosts(folder):
    text = (folder / "hosts").read_bytes().decode(errors="replace")
    try:
        hosts = parse_hosts(text)
    except ConfigurationError:
        hosts = []
    for host in [*hosts, *read_hostfile(str(folder / "hosts"))]:
        assert host.slots > 0
        assert not host.name.startswith("-")
        assert set(host.name).isdisjoint(" \n\0;/$`'\"")


def _write_traces(folder):
    for rank in range(2):
        clocks = {"shared": rank == 0, "offset": 0.5, "error": 1e-5, "at": 10.0}
        about = {"zero": 9.0, "host": "node", "clock": clocks}
        other = {"generator": "lightning_ring", "run": "r1", "began": "2026-01-01T00:00:00"}
        other |= {"world_size": 2, "rank": about}
        file = TraceFile(rank_file(folder / "trace.json", rank), other, max_bytes=2**20)
        names = [("process_name", 0), ("thread_name", 1)]
        meta = {"ph": "M", "pid": rank, "ts": 0, "args": {"name": f"rank {rank}"}}
        file.append(json.dumps(meta | {"name": name, "tid": tid}) for name, tid in names)
        event = {"ph": "X", "pid": rank, "tid": 1, "ts": 1e6, "dur": 5e3}
        file.append(
            json.dumps(event | {"name": f"step {step}", "args": {"step": step}})
            for step in range(4)
        )
        file.close(other | {"ended": "finished"})


def _read_traces(folder):
    from lightning_ring.cli.timeline import _report
    from lightning_ring.timeline.drawing import read_trace

    merged = merge(folder / "trace.json", folder / "out.json")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        _report(merged)
    read_trace(merged.path, None)


def _write_run(folder):
    from tests.tools.report.made_up import write_run

    scalars = {"train/loss": [3.0, 2.0], "val/loss": [2.0, 1.0], "ring/step_ms": [5.0, 6.0]}
    scalars["ring/slowest_rank_behind_ms/rank_1"] = [1.0, 2.0]
    config = "model: {lr: 0.1}\nlogger:\n  api_key: k\n  names: &n [a, b]\n  same: *n\n"
    write_run(folder / "run", scalars, config=config, pictures=("nearest",))


def _read_run(folder):
    from lightning_ring.tools import report
    from lightning_ring.tools.report.runs import read_runs

    # Matplotlib takes a second for a page, and the template is compiled for each.
    charts = patch.multiple(report, line_chart=_no_chart, bar_chart=_no_chart)
    with charts, patch.object(report, "Environment", _environment):
        report.write_page(read_runs([folder / "run"]))


def _no_chart(*arguments, **options):
    return Markup()


def _environment(**options):
    return _made.setdefault("environment", Environment(**options))


_made = {}


def _write_images(folder):
    from PIL import Image

    write_folder(folder, classes=1, images=1, size=(24, 32))
    Image.open(folder / "c0" / "0.jpg").save(folder / "c0" / "0.png")


def _read_images(folder):
    for path in sorted(folder.glob("*/*")):
        few = patch("lightning_ring.data.decoding.MAX_PIXELS", 2**24)
        with few, suppress(ValueError, OSError):
            assert decode_rgb(path.read_bytes()).nbytes <= 3 * 2**24


PARSERS = {
    "manifest": Parser(_write_shards, f"dst/{MANIFEST}", _read_shards, (ShardError,)),
    "index": Parser(_write_shards, "dst/index/*/*", _read_shards, (ShardError,)),
    "messages": Parser(_write_messages, "messages", _read_messages),
    "hosts": Parser(_write_hosts, "hosts", _read_hosts, (ConfigurationError,)),
    "traces": Parser(_write_traces, "*.jsonl", _read_traces, (ConfigurationError,)),
    "runs": Parser(_write_run, "run/**/*", _read_run, (ConfigurationError,)),
    "images": Parser(_write_images, "*/*", _read_images),
}


# -- the driver


def failures(name, count, first=0):
    """What went wrong with mutations ``first`` to ``first + count`` for the parser ``name``."""
    parser = PARSERS[name]
    folder = Path(tempfile.mkdtemp(prefix="mutations-"))
    try:
        parser.write(folder)
        # also imports what is imported late, so that it counts for no mutation
        parser.read(folder)
        paths = sorted(path for path in folder.glob(parser.files) if path.is_file())
        files = {path: path.read_bytes() for path in paths}
        path = paths[0]
        with _limits():
            for number in range(first, first + count):
                random, before = Random(f"{name} {number}"), path
                path = random.choice(paths)
                if before != path:
                    before.write_bytes(files[before])
                is_events = "tfevents" in path.name and random.random() < 0.8
                path.write_bytes((_events_mutated if is_events else mutated)(files[path], random))
                for problem in _problems(partial(parser.read, folder), parser.errors):
                    yield f"{name} {number} ({path.name}): {problem}"
    finally:
        shutil.rmtree(folder)


def _problems(read, errors):
    raised = None
    began = time.process_time()
    signal.alarm(_HANGS)
    try:
        read()
    except Exception as error:
        raised = error
    finally:
        signal.alarm(0)
    if (seconds := time.process_time() - began) > SECONDS:
        yield f"it took {seconds:.1f} s"
    if raised is not None and not isinstance(raised, errors):
        yield "".join(traceback.format_exception(raised))
    while raised is not None:
        if isinstance(raised, (MemoryError, TimeoutError)):
            yield f"an error hides {raised!r}"
        raised = raised.__context__


@contextmanager
def _limits():
    """At most `MOST_BYTES` more than now, and a signal that ends what hangs."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    handler = signal.signal(signal.SIGALRM, _raise_timeout)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _raise_timeout(number, frame):
    raise TimeoutError(f"it hangs for {_HANGS} s")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--parser", choices=PARSERS, action="append", help="default: all")
    options = parser.parse_args()
    failed = 0
    for name in options.parser or PARSERS:
        found = list(failures(name, options.count, options.first))
        told = f"{name}: {options.count} mutations, {len(found)} failures"
        print(*found[:20], told, sep="\n", flush=True)
        failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
