"""What strangers do to the listeners of a job: ``attack.py ADDRESS FOLDER``, until it is killed.

A file ``FOLDER/listens.PID`` names a process of the job, and in it are ports that are attacked
before they answer. Of the other ports at which these processes listen, those are attacked that
begin with a challenge: torch's and MPI's do not.
"""

import contextlib
import hmac
import itertools
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path

SILENT = 2000
SEVERAL = 40
GUESSES = ("", "?", "ringrun", "spawn", "torchrun")
LOOPBACK = ("0100007F", 24 * "0" + "01000000")  # as in /proc/net
held = []


def connect(place, first=b""):
    one = socket.create_connection(place, timeout=5.0)
    held.append(one)
    one.sendall(first)
    return one


def many(number, first, drip=b""):
    """``number`` connections that send ``first``, and then ``drip``, a byte at a time."""

    def attack(place):
        opened = []
        for _ in range(number):
            with contextlib.suppress(OSError):
                if first or drip:
                    opened.append(connect(place, first))
                else:  # a full backlog answers none
                    held.append(one := socket.socket())
                    one.setblocking(False)
                    one.connect_ex(place)
        for byte in drip:
            time.sleep(0.05)
            for one in opened:
                with contextlib.suppress(OSError):
                    one.send(bytes([byte]))

    return attack


def hello(secret, name, nonce, guest):
    message = {"kind": "hello", "nonce": "0" * 32, "pid": 1, "token": secret, **guest}
    text = json.dumps([nonce, message], sort_keys=True).encode()
    message["proof"] = hmac.new(f"{name} {secret}".encode(), text, "sha256").hexdigest()
    return json.dumps(message).encode() + b"\n"


def true_secrets():
    """Those of this user's jobs, which no stranger can read."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"RING_SECRET=(\w+)", environ.read_bytes().decode("latin-1")))
    return found


def say_hello(place, replayed=False):
    """As each rank, member and host, by secrets that are guessed; or with the true one, but to the
    challenge of another connection.
    """
    guests = [{"rank": rank, "member": rank, "host": "b", "start": 1} for rank in range(2)]
    doors = ("rendezvous", "watch", "steward", "agents")
    secrets = true_secrets() if replayed else GUESSES
    for secret, name, guest in itertools.product(secrets, doors, guests):
        with contextlib.suppress(OSError, ValueError):
            one = connect(place)
            challenged = connect(place) if replayed else one
            nonce = json.loads(challenged.makefile("rb").readline() or b"{}").get("nonce")
            one.sendall(hello(secret, name, nonce, guest) + b'{"kind": "left"}\n')


ATTACKS = (
    many(SILENT, b""),
    many(SEVERAL, 1_000_000 * b"\n"),
    many(SEVERAL, b'{"kind": "hello", "non'),
    many(SEVERAL, struct.pack("!Q", 2**60) + 100 * b"x"),
    many(SEVERAL, b"", drip=400 * b"x"),
    say_hello,
    partial(say_hello, replayed=True),
)


def listening(pid):
    """The ports at which process ``pid`` listens, and whether on loopback alone."""
    own = set()
    with contextlib.suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{file}")))
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in own:
                    address, port = fields[1].split(":")
                    found[int(port, 16)] = address in LOOPBACK
    return found


def is_door(place):
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=0.5) as one:
        return one.recv(100).startswith(b'{"kind": "challenge"')
    return False


def main(address, folder):
    attacked = set()
    while True:
        for file in Path(folder).glob("listens.*"):
            known = set(map(int, file.read_text().split()))
            for port in (known | listening(file.suffix[1:]).keys()) - attacked:
                if port in known or is_door((address, port)):
                    attacked.add(port)
                    (Path(folder) / f"attacked.{port}").touch()
                    for attack in ATTACKS:
                        place = (address, port)
                        threading.Thread(target=attack, args=(place,), daemon=True).start()
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
