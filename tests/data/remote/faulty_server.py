"""An HTTP server of a folder that answers requests for ranges, with planted faults."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lightning_ring.data.shards.manifest import MANIFEST

_FLIPPED = bytes(byte ^ 1 for byte in range(256))


@dataclass
class Faults:
    """Chances of each fault, drawn for every request for a part of a shard from ``seed``.

    ``dead`` answers nothing any more; ``statuses`` gives fixed answers by a part of the path.
    """

    delay: float = 0.0  # seconds, of every request
    hang: float = 0.0
    unavailable: float = 0.0  # 503
    truncate: float = 0.0  # the connection closes in the middle of the body
    short: float = 0.0  # a whole answer, of fewer bytes than were asked for
    reset: float = 0.0
    flip: float = 0.0  # the lowest bit of every byte
    dead: bool = False
    no_ranges: bool = False
    statuses: dict[str, int] = field(default_factory=dict)
    seed: int = 0


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, folder))
        self.faults = Faults()
        self.counts: Counter[str] = Counter()  # faults that were played, and requests
        self.bytes_sent = 0
        self.ranges: list[tuple[str, int, int]] = []
        self.closing = threading.Event()
        self._draw = random.Random(0)
        self._guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def plant(self, **faults: Any) -> None:
        self.faults = Faults(**faults)
        self._draw = random.Random(self.faults.seed)
        self.counts.clear()
        self.ranges.clear()
        self.bytes_sent = 0

    def fault(self) -> str | None:
        with self._guard:
            point = self._draw.random()
            for name in ("hang", "unavailable", "truncate", "short", "reset", "flip"):
                point -= getattr(self.faults, name)
                if point < 0:
                    self.counts[name] += 1
                    return name
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self._folder = folder
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        """Not to stderr."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server, faults = self.server, self.server.faults
        server.counts["requests"] += 1
        if faults.dead:
            server.closing.wait(120)
            return
        time.sleep(faults.delay)
        path = self._folder / self.path.lstrip("/")
        for part, status in faults.statuses.items():
            if part in self.path:
                return self._status(status)
        if not path.is_file():
            return self._status(404)
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked and not faults.no_ranges else (0, size)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(stop - start) if body else b""
        fault = server.fault() if body and path.suffix == ".tar" else None
        if fault == "hang":
            server.closing.wait(120)
            self.close_connection = True
            return None
        if fault == "unavailable":
            return self._status(503)
        if fault == "reset":  # a TCP reset instead of an answer
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if fault == "flip":
            data = data.translate(_FLIPPED)
        if fault == "short":
            data = data[:-1]
        self.send_response(206 if asked and not faults.no_ranges else 200)
        self.send_header("Content-Length", str(len(data) if body else size))
        if asked and not faults.no_ranges:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if fault == "truncate":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        self.wfile.write(data)
        if body:
            server.bytes_sent += len(data)
            server.ranges.append((path.name, start, stop))
        return None

    def _status(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    assert (folder / MANIFEST).exists()
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
