"""Python processes for ranks that have their libraries imported already: a server imports them
once, and forks.

Importing Lightning takes seconds of CPU time, which hundreds of ranks would pay one by one.
`python` in the place of ``sys.executable`` starts a small process that hands its arguments,
environment, folder and standard streams to the server, passes signals on to the rank, and ends as
the rank ends. With the variables of `ranks` the same goes for ranks that a launcher starts by
itself.

Not for tests of what a rank's launcher sees or sends: the rank is a child of the server, in a
session of its own.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.forked_ranks import fork_server
from tests.forked_ranks.fork_server import ADDRESS, FORKED_RANKS

SERVER = fork_server.__file__
_servers = []


def start():
    """Start the servers, for this process and for what it starts from now on. They import when a
    rank asks for it.
    """
    from tests.processes import clean_env

    # the name of a socket may have 107 characters, so not pytest's folder
    os.environ[ADDRESS] = tempfile.mkdtemp(prefix="forked-") + "/server"
    # Hashes of strings differ between the two, and with them the order of a set, as between ranks
    # that are started one by one: ranks of even number come from one, those of odd number from the
    # other.
    for number in range(2):
        command = [sys.executable, SERVER, "serve", f"{os.environ[ADDRESS]}-{number}"]
        _servers.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, env=clean_env(), start_new_session=True
            )
        )


def python():
    """The command for `sys.executable`."""
    if ADDRESS not in os.environ:
        start()
    return [sys.executable, "-I", "-S", SERVER, "rank"]


def ranks():
    """Variables with which launchers' ranks are forked, as long as they are started as ``python
    script`` or ``python -m module``. What a rank starts in turn is not."""
    from tests.processes import clean_env

    return {"PYTHONPATH": os.pathsep.join([FORKED_RANKS, clean_env()["PYTHONPATH"]])}


def every():
    """`ranks`, with which processes that are no ranks are forked too, and what they start."""
    return ranks() | {fork_server.EVERY: "1"}


def close():
    """End the servers that this process started, and ranks that are left."""
    for server in _servers:
        server.stdin.close()
    for server in _servers:
        server.wait(60)  # it may still import
    if _servers:
        shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)
    _servers.clear()
