"""Python processes for ranks that have their libraries imported already: a server imports them once, and forks.

Importing Lightning takes seconds of CPU time, which hundreds of ranks would pay one by one. `python` in the place of
``sys.executable`` starts a small process that hands its arguments, environment, folder and standard streams to the
server, passes signals on to the rank, and ends as the rank ends. The rank imports this project's packages itself.

Not for tests of what a rank's launcher sees or sends: the rank is a child of the server, in a session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path

ADDRESS = "TESTS_FORK_SERVER"
RANKS = ("RING_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
IMPORTS = ("lightning.pytorch", "torchvision.transforms.v2", "torch.utils.tensorboard", "numpy.random")
# Read once when Python, the loader or a library starts, and a file descriptor that a rank inherits: a rank with
# other values is started anew.
READ_AT_START = ("GLIBC", "KMP_", "LD_PRELOAD", "LIGHTNING", "MALLOC_", "MKL_", "OMP_", "PYTHON", "PYTORCH")
READ_AT_START += ("TORCH", "RING_STORE_FD")


_servers: list[subprocess.Popen[bytes]] = []


def python() -> list[str]:
    """The command for `sys.executable`, in pytest's process. The first call starts the servers."""
    if not _servers:
        from tests.processes import clean_env

        # the name of a socket may have 107 characters, so not pytest's folder
        os.environ[ADDRESS] = tempfile.mkdtemp(prefix="forked-") + "/server"
        # Hashes of strings differ between the two, and with them the order of a set, as between ranks that are started
        # one by one: ranks of even number come from one, those of odd number from the other.
        for number in range(2):
            command = [sys.executable, __file__, "serve", f"{os.environ[ADDRESS]}-{number}"]
            _servers.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=clean_env(), start_new_session=True))
    return [sys.executable, "-I", "-S", __file__, "rank"]


def close() -> None:
    """End the servers, and ranks that are left."""
    for server in _servers:
        assert server.stdin is not None
        server.stdin.close()
    for server in _servers:
        server.wait(60)  # it may still import
    if _servers:
        shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)
    _servers.clear()


def of_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


class Server:
    """Forks a rank for each connection, and ends with its standard input."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._env = dict(os.environ)
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # by pidfd, which is readable when the rank has ended

    def serve(self) -> list[str] | None:
        """The arguments of a rank, in the rank; `None` at the server's end."""
        while True:
            clients = {client.fileno(): pid for pid, client in self._ranks.values()}
            ready = select.select([0, self._listener, *self._ranks, *clients], [], [])[0]
            if 0 in ready:
                for pid, _ in self._ranks.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            for client in clients.keys() & set(ready):
                os.kill(clients[client], signal.SIGKILL)  # its small process was killed
            for pidfd in self._ranks.keys() & set(ready):
                self._report(pidfd)
            if self._listener in ready and (arguments := self._fork(self._listener.accept()[0])):
                return arguments

    def _report(self, pidfd: int) -> None:
        pid, client = self._ranks.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            client.sendall(f"{code}\n".encode())
        client.close()
        os.close(pidfd)

    def _fork(self, client: socket.socket) -> list[str] | None:
        data, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
        while not data.endswith(b"\n"):
            data += client.recv(1 << 20)
        request = json.loads(data)
        if of_start(request["env"]) != of_start(self._env):
            pid = 0
        elif pid := os.fork():
            self._ranks[os.pidfd_open(pid)] = pid, client
        else:
            self._become(request, client, streams)
            return request["arguments"]
        for stream in streams:
            os.close(stream)
        client.sendall(f"{pid}\n".encode())
        if not pid:
            client.close()
        return None

    def _become(self, request: dict, client: socket.socket, streams: list[int]) -> None:
        os.setsid()
        # `processes.end_session` finds it by this name
        Path("/proc/self/comm").write_text(f"of {request['session']}")
        for pidfd, (_, other) in self._ranks.items():
            os.close(pidfd)
            other.close()
        self._listener.close()
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        of_imports = {name: value for name, value in os.environ.items() if name not in self._env}
        os.environ.clear()
        os.environ.update(of_imports | request["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.modules["numpy"].random.seed()  # Python's own generator is seeded by `os.fork`


def run(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` does: a script, ``-m module`` or ``-c code``."""
    import runpy

    first, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv = arguments
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def end(rank: Callable[[], None]) -> None:
    """End the process as Python does after ``rank``, but for taking all modules down, which lasts seconds."""
    import atexit
    import threading

    code: object = None
    try:
        rank()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and not mpi.Is_finalized():
        mpi.Finalize()  # what mpi4py has Python's C code call
    sys.stdout.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def ask_for_rank(arguments: list[str]) -> None:
    """Be the rank's small process. Does not return."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    server = socket.socket(socket.AF_UNIX)
    request = {"arguments": arguments, "env": dict(os.environ), "folder": os.getcwd(), "session": os.getsid(0)}
    answers = server.makefile()
    pid = 0
    with contextlib.suppress(OSError):  # no server
        server.connect(f"{os.environ.get(ADDRESS, '')}-{int(rank) % 2}")
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        pid = int(answers.readline() or 0)
    if not pid:
        os.execv(sys.executable, [sys.executable, *arguments])

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = int(answers.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        ask_for_rank(sys.argv[2:])
    else:
        import gc
        import importlib

        server = Server(sys.argv[2])  # before the imports: ranks wait for them
        for name in IMPORTS:
            importlib.import_module(name)
        gc.freeze()  # a rank's collections leave the server's pages alone
        end(lambda: run(given)) if (given := server.serve()) is not None else os._exit(0)
