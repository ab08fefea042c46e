"""An elastic job: its steward in one process, and in the others its members."""

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.scale.processes import Reader, decode_members_once, footprint, on_all
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Membership, Report
from lightning_ring.elastic.steward import Steward
from lightning_ring.elastic.store import StewardStore
from lightning_ring.job.members import exchange_members, own_member
from lightning_ring.job.ranks import RankInfo

WAIT = 300.0
AT_ONCE = 8  # threads
LOOK_SECONDS = 0.01  # as `launch.elastic`


class Serving:
    """The steward. Whoever is removed has been killed."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [0]
        self._before = footprint()
        self._killed: list[int] = []
        self._steward = Steward(Membership(), lambda member, *_: self._killed.append(member))
        for number in range(world_size):
            self._steward.expect(number)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._steward.step(LOOK_SECONDS)
            while self._killed:
                self._steward.gone(self._killed.pop(), "killed")

    def variables(self) -> Mapping[str, str]:
        return self._steward.variables(0)

    def facts(self) -> dict[str, float]:
        now = footprint()
        return {name: value - self._before[name] for name, value in now.items()}


class SharedMember(Member):
    """Read by the `Reader` of its process."""

    def __init__(self, environ: Mapping[str, str], reader: Reader) -> None:
        super().__init__(environ)
        self._reader = reader

    def _listen(self) -> None:
        assert self._connection is not None
        self._reader.add(self._connection.socket, self._read)

    def _read(self) -> str | None:
        assert self._connection is not None
        messages, over = self._connection.receive()
        for message in messages:
            self._take(message)
        return over


class Members:
    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        self.ranks = ranks
        self._members: dict[int, Member] = {}
        self._stops: list[float] = []
        decode_members_once()

    def open(self, variables: Mapping[str, str]) -> float:
        def open_one(number: int) -> None:
            member = SharedMember({**variables, "RING_MEMBER": str(number)}, reader)
            member.on_stop = lambda error: self._stops.append(time.monotonic())
            member.open()
            self._members[number] = member

        reader = Reader()
        on_all(self, open_one, AT_ONCE)
        return time.monotonic()

    def enter(self) -> float:
        """The next view, and its members' cores and nodes through the steward's store."""
        on_all(self, self._enter)
        return time.monotonic()

    def _enter(self, number: int) -> None:
        member = self._members[number]
        member.report(Report(0, between=True))
        view = member.next_view(WAIT)
        place = view.members.index(number), len(view.members), 0, 1, number // 8, 512
        info = RankInfo(*place, "ringrun", view.generation)
        own = own_member(info, number, torch.device("cpu"))
        store = StewardStore(member, WAIT)  # torch keeps no reference to it
        exchange_members(own, info, store)

    def deaths(self) -> list[float]:
        """When each heard that its view is over, once all have."""
        while len(self._stops) < len(self.ranks):
            time.sleep(0.01)
        return self._stops

    def finish(self) -> float:
        on_all(self, lambda number: self._members[number].finish())
        return time.monotonic()
