"""The server that `tests.forked` starts, the ranks that it forks, and the small processes that ask
for them.

Run by its path: ``serve SOCKET`` is the server, ``rank ARGUMENTS`` the small process of ``python
ARGUMENTS``. It imports little, as a small process is started for each rank.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

ADDRESS = "TESTS_FORK_SERVER"
FORKED_RANKS = str(Path(__file__).parent)  # on PYTHONPATH it has the ranks of any launcher forked
RANKS = (
    "RING_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "RING_MEMBER",
)
IMPORTS = (
    "lightning.pytorch",
    "torchvision.transforms.v2",
    "torch.utils.tensorboard",
    "numpy.random",
    "omegaconf",  # which Lightning imports to save hyperparameters
    "pytest",  # which checks import
    # This package too: most ranks would import these modules, for a fifth of a second each. Nothing
    # in them depends on a rank.
    "lightning_ring.integrations.lightning.elastic.strategy",
    "lightning_ring.integrations.fabric",
    "lightning_ring.loops.distribute",
    "lightning_ring.algorithms.local",
    "lightning_ring.algorithms.sharded",
    "lightning_ring.gradients.compression",
    "lightning_ring.data",
    "lightning_ring.monitor",
)
# Read once when Python, the loader or a library starts: a rank with other values is started anew.
READ_AT_START = (
    "GLIBC",
    "KMP_",
    "LD_PRELOAD",
    "LIGHTNING",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "PYTORCH",
    "TORCH",
)
# Read later, or set by imports in pytest's process.
READ_LATER = ("KMP_DUPLICATE_", "KMP_INIT_", "LIGHTNING_RING_", "PYTORCH_NVML_", "TORCHELASTIC_")
READ_LATER += ("TORCHINDUCTOR_", "TORCH_NCCL_")
ENTERED = ("net", "uts", "mnt")  # namespaces: those of a made-up host (`tests/hosts.py`)
EVERY = "TESTS_FORK_EVERY"  # where it is set, all processes are forked, not ranks alone
OPTIONS = ("-B", "-u", "-W")  # of Python, that a forked rank heeds


def of_start(env):
    found = {
        name: env[name]
        for name in env
        if name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
    }
    path = without_forked_ranks(found.pop("PYTHONPATH", ""))
    return found, set(path.split(os.pathsep))


def without_forked_ranks(path):
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if folder != FORKED_RANKS)


def namespaces():
    """Of this process. A rank in others than `ENTERED` is started anew."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}


class Server:
    """Forks a rank for each connection, and ends with its standard input. The first connection
    has it import.
    """

    def __init__(self, address, prepare):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(128)
        self._prepare = prepare
        self._env = dict(os.environ)
        self._namespaces = namespaces()
        # by pidfd, which is readable when the rank has ended
        self._ranks = {}

    def serve(self):
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

    def _report(self, pidfd):
        pid, client = self._ranks.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            client.sendall(f"{code}\n".encode())
        client.close()
        os.close(pidfd)

    def _fork(self, client):
        data, files, _, _ = socket.recv_fds(client, 1 << 20, 16)
        while data and not data.endswith(b"\n") and (more := client.recv(1 << 20)):
            data += more
        if not data.endswith(b"\n"):  # it was killed meanwhile
            for file in files:
                os.close(file)
            client.close()
            return None
        request = json.loads(data)
        spaces = {
            name
            for name, number in self._namespaces.items()
            if request["namespaces"].get(name) != number
        }
        if of_start(request["env"]) != of_start(self._env) or not spaces.issubset(ENTERED):
            pid = 0
        else:
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
            if pid := os.fork():
                self._ranks[os.pidfd_open(pid)] = pid, client
            else:
                self._become(request, client, files, spaces)
                return request["arguments"]
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # it was killed meanwhile, and its rank will be
            client.sendall(f"{pid}\n".encode())
        if not pid:
            client.close()
        return None

    def _become(self, request, client, files, spaces):
        import ctypes

        os.setsid()
        # `processes.end_session` finds it by this name
        Path("/proc/self/comm").write_text(f"of {request['session']}")
        for pidfd, (_, other) in self._ranks.items():
            os.close(pidfd)
            other.close()
        self._listener.close()
        client.close()
        for number, stream in enumerate(files[:3]):
            os.dup2(stream, number)
            os.close(stream)
        for name, space in zip(ENTERED, files[3:], strict=False):
            if name in spaces and ctypes.CDLL(None, use_errno=True).setns(space, 0):
                raise OSError(ctypes.get_errno(), f"the namespace {name}")
            os.close(space)
        env = request["env"]
        os.sched_setaffinity(0, request["cores"])
        os.chdir(request["folder"])
        of_imports = {name: value for name, value in os.environ.items() if name not in self._env}
        os.environ.clear()
        os.environ.update(of_imports | env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.modules["numpy"].random.seed()  # Python's own generator is seeded by `os.fork`


def options_of(arguments):
    """Python's own options, those for warnings as two words, and what follows them."""
    options, rest = [], list(arguments)
    while rest and rest[0].startswith(OPTIONS):
        option = rest.pop(0)
        options += [option[:2], option[2:] or rest.pop(0)] if option.startswith("-W") else [option]
    return options, rest


def run(arguments):
    """What ``python ARGUMENTS`` does: a script, ``-m module`` or ``-c code``."""
    import itertools
    import runpy
    import types
    import warnings

    sys.orig_argv = [sys.executable, *arguments]
    options, (first, *rest) = options_of(arguments)
    sys.dont_write_bytecode |= "-B" in options
    told = [words for option, words in itertools.pairwise(options) if option == "-W"]
    sys.warnoptions += told
    warnings._processoptions(told)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv = [first, *rest]
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def end(rank):
    """End the process as Python does after ``rank``, but for taking all modules down, which
    lasts seconds.
    """
    import atexit
    import threading

    code = None
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
    threading._shutdown()
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and not mpi.Is_finalized():
        mpi.Finalize()  # what mpi4py has Python's C code call
    sys.stdout.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def ask_for_rank(arguments):
    """Be the small process of a rank, and do not return; unless the rank has to be started anew."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    env = dict(os.environ)
    request = {"arguments": arguments, "env": env, "folder": os.getcwd(), "session": os.getsid(0)}
    request |= {"namespaces": namespaces(), "cores": sorted(os.sched_getaffinity(0))}
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ENTERED]
    server = socket.socket(socket.AF_UNIX)
    answers = server.makefile()
    pid = 0
    with contextlib.suppress(OSError):  # no server
        server.connect(f"{env.get(ADDRESS, '')}-{int(rank) % 2}")
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2, *spaces])
        pid = int(answers.readline() or 0)
    if not pid:
        answers.close()
        server.close()
    for number in spaces:
        os.close(number)
    if not pid:
        return

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = int(answers.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def become_a_rank_if_it_is_one():
    """In a Python that starts with `FORKED_RANKS` on its path. What it starts in turn is not
    forked, except with `EVERY`.
    """
    options, rest = options_of(sys.orig_argv[1:])
    own = {name for name in (*RANKS, EVERY) if name in os.environ}
    if not own or not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        return  # multiprocessing's children are `-c`
    if EVERY not in os.environ:
        os.environ["PYTHONPATH"] = without_forked_ranks(os.environ["PYTHONPATH"])
    sys.path.remove(FORKED_RANKS)
    ask_for_rank([*options, *rest])


def imports():
    import gc
    import importlib

    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # a rank's collections leave the server's pages alone


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        ask_for_rank(sys.argv[2:])
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    else:
        server = Server(sys.argv[2], imports)
        end(lambda: run(given)) if (given := server.serve()) is not None else os._exit(0)
