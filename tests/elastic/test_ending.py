"""What a rank of an elastic job says as it ends, and with which exit code."""

import sys
from unittest.mock import Mock

import pytest

from lightning_ring.elastic import ending
from lightning_ring.elastic.membership import GenerationOver, JobEnded


class Ended(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("no such photo"), 1, "ValueError: no such photo"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (
            GenerationOver("Generation 0 is over: process 2 has died."),
            1,
            "cannot go on after the death of a rank outside of a fit",
        ),
        (JobEnded("The job ends: asked to stop.", 143), 143, ""),
        (JobEnded("The job ends: the training has finished.", 0), 0, ""),
    ],
)
def test_the_last_words_of_a_rank(monkeypatch, error, code, said):
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(ending, "end_process", end)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    member = Mock(number=1)
    ending.end_job_on_error(member)
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, None)
    assert codes == [code]
    assert [said in told.args[0] for told in member.fail.call_args_list] == [True] * bool(said)
