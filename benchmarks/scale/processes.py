"""Processes that each stand for many ranks, and take orders over a pipe."""

import functools
import os
import selectors
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_ring.job import members

T = TypeVar("T")
ORDER_SECONDS = 600.0
# of `struct tcp_info`: bytes_acked and bytes_received, data_segs_in and data_segs_out
_BYTES, _MESSAGES = struct.Struct("=120xQQ"), struct.Struct("=152xII")


class Ranks(Protocol):
    """The ranks of one process. Orders are the names of its other methods."""

    ranks: Sequence[int]


def on_all(ranks: Ranks, function: Callable[[int], T], at_once: int | None = None) -> list[T]:
    """``function`` of each rank, in threads: all at the same time, unless it waits for no other."""
    with ThreadPoolExecutor(at_once or len(ranks.ranks)) as pool:
        return list(pool.map(function, ranks.ranks))


class Reader:
    """One thread that reads the connections of all ranks of a process, in place of a thread each:
    thousands of threads would wait for one interpreter.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        threading.Thread(target=self._read, daemon=True).start()

    def add(self, connection: socket.socket, read: Callable[[], str | None]) -> None:
        """Call ``read`` whenever something has arrived, until it tells that the end has."""
        read()  # what came with the welcome
        self._selector.register(connection, selectors.EVENT_READ, read)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select(0.01):
                if key.data() is not None:
                    self._selector.unregister(key.fileobj)


def decode_members_once() -> None:
    """A process that stands for a thousand ranks decodes the list of all only once."""
    decode, lock = functools.cache(members.decode_members), threading.Lock()

    def decode_once(published: bytes) -> list[members.JobMember]:
        with lock:
            return decode(published)

    members.decode_members = decode_once


def _serve(make: Callable[[], Ranks], orders: Connection, others: Sequence[Connection]) -> None:
    for other in others:
        other.close()
    try:
        ranks = make()
        while True:
            name, arguments = orders.recv()
            orders.send(getattr(ranks, name)(*arguments))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class Processes:
    """One process for each of ``makes``, which make its ranks there. It is forked: start no
    thread before.
    """

    def __init__(self, makes: Sequence[Callable[[], Ranks]]) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = get_context("fork")
        for make in makes:
            ours, theirs = context.Pipe()
            arguments = make, theirs, [*self._pipes, ours]
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def order(self, name: str, *arguments: Any, only: Sequence[int] | None = None) -> list[Any]:
        """The answers of all processes, or of ``only`` some, to the order ``name``."""
        pipes = [pipe for number, pipe in enumerate(self._pipes) if only is None or number in only]
        for pipe in pipes:
            pipe.send((name, arguments))
        answers = []
        for pipe in pipes:
            if not pipe.poll(ORDER_SECONDS):
                raise SystemExit(f"{name} was not done within {ORDER_SECONDS:.0f} s")
            answers.append(pipe.recv())
        return answers

    def kill(self, number: int) -> float:
        """End one process without a word, and take no more answers from it. Returns when."""
        died = time.monotonic()
        os.kill(self._processes[number].pid, signal.SIGKILL)
        self._pipes.pop(number).close()
        return died

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def footprint() -> dict[str, float]:
    """Of this process: resident MiB, open descriptors, and what its connections have carried."""
    status = Path("/proc/self/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    names = os.listdir("/proc/self/fd")
    total = dict.fromkeys(("bytes", "messages"), 0)
    for name in names:
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no TCP connection
            continue
        total["bytes"] += sum(_BYTES.unpack_from(told))
        total["messages"] += sum(_MESSAGES.unpack_from(told))
    return {"resident": resident, "descriptors": len(names), **total}
