"""Writers of traces, each killed at some moment: ``python -m tests.timeline.killed_writers PATH
NUMBER``.

Prints the number of events in each file and ``torn`` if its last line is torn. A file that does not
hold exactly the first events that were written is an error. Some writers have forked a process, as
a data loader does. It lives on and does not keep the next writer from the path.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

from lightning_ring.timeline.trace_files import TraceFile, read_events, read_other

PAGE = 4096  # SIGKILL ends a write(2) between two pages
OTHER = {"generator": "lightning_ring", "run": "1"}


def numbers(path):
    assert read_other(path)["run"] == "1"
    return [json.loads(event)["i"] for event in read_events(path)]


def some_events(first, random_):
    """Lines that end at, before and after the ends of pages."""
    lengths = [
        random_.choice([0, 3, 90, 150, 1000, 2040, PAGE - 40]) for _ in range(random_.randrange(25))
    ]
    return [
        json.dumps({"i": first + number, "x": "x" * length})
        for number, length in enumerate(lengths)
    ]


def write_for_ever(path, seed, until_the_end, appended):
    random_, written = random.Random(seed), 0
    file = TraceFile(path, OTHER, max_bytes=1 << 28)
    if seed % 50 == 1:
        runs, tell = os.pipe()
        if os.fork() == 0:
            os.write(tell, b"1")
            os.read(until_the_end, 1)
            os._exit(0)
        # killed before, the writer would leave a fork that has yet to let go of the path
        os.read(runs, 1)
    while True:
        events = some_events(written, random_)
        file.append(events)
        written += len(events)
        appended[0] = min(appended[0] + 1, 255)


def kill_one(path, seed, appends, after, pipe):
    """Kill a writer ``after`` seconds after its first ``appends``; the number of events in its
    file.
    """
    appended = mmap.mmap(-1, 1)  # shared with the writer
    writer = os.fork()
    if writer == 0:
        try:
            os.close(pipe[1])
            write_for_ever(path, seed, pipe[0], appended)
        finally:
            os._exit(1)
    until = time.monotonic() + 60
    while appended[0] < max(1, appends) and time.monotonic() < until:
        time.sleep(0.0001)
    time.sleep(after)
    os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    assert os.WIFSIGNALED(status), "it wrote until it was killed"
    found, torn = numbers(path), not path.read_bytes().endswith(b"\n")
    assert found == list(range(len(found))), "none but the last ones is missing"
    return f"{len(found)}{' torn' * torn}"


def main(path, count):
    random_, pipe = random.Random(2), os.pipe()  # whose end closes with this process
    for seed in range(count):
        print(kill_one(path, seed, random_.randrange(40), random_.uniform(0, 0.002), pipe))
        if seed % 10 == 0:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
