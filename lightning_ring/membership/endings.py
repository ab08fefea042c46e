"""How a rank learns that its view, or the whole job, has come to an end."""

from __future__ import annotations

from lightning_ring.errors import PeerFailedError


class GenerationOver(PeerFailedError):
    """The ranks of this generation do not go on together: one died, or others wait to take part.
    A view follows.
    """


class JobEnded(PeerFailedError):
    """The steward has ended the job, with ``exit_code``: 0 if the training had been finished by
    all.
    """

    def __init__(self, why: str, exit_code: int = 1) -> None:
        super().__init__(why)
        self.exit_code = exit_code

    @property
    def finished(self) -> bool:
        return self.exit_code == 0


class TooFewRanks(JobEnded):
    """The job has ended because it had too few ranks for too long: those that are left save what
    they have.
    """
