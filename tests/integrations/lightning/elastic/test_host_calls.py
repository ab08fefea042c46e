"""Collectives between steps that are made again: results, sections, and a rank that missed the
end of one.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from lightning_ring import ElasticStrategy
from lightning_ring.errors import PeerFailedError
from lightning_ring.integrations.lightning.elastic.calls import HostCalls
from lightning_ring.integrations.lightning.elastic.loops import change_loops

DIED = PeerFailedError("rank 1 died")


def calls_beside(count, last):
    """Beside another rank that has made ``count`` calls, the last of which gave ``last``."""
    calls = HostCalls(lambda error: calls.compare([calls.of_rank(), (count, last)]))
    return calls


def dying(times, result):
    """A collective in which somebody dies the first ``times`` times."""
    deaths = iter(range(times))

    def run():
        if next(deaths, None) is not None:
            raise DIED
        return result

    return run


def test_a_call_is_made_again_as_often_as_somebody_dies_in_it():
    calls, again = calls_beside(0, None), []
    assert calls.call(dying(2, "result"), lambda: again.append(1)) == "result"
    assert len(again) == 2


def test_whoever_missed_the_end_of_a_call_takes_the_result_of_a_rank_that_did_not():
    calls, again = calls_beside(2, torch.tensor(5.0)), []
    calls.call(dying(0, "the first"))
    assert calls.call(dying(1, "never"), lambda: again.append(1)) == torch.tensor(5.0)
    assert not again


def test_calls_within_a_section_are_not_made_again_by_themselves():
    calls, attempts = calls_beside(0, None), []

    def section():
        attempts.append(1)
        calls.call(dying(1 if len(attempts) == 1 else 0, None))
        return "over"

    assert calls.call(section) == "over"
    assert len(attempts) == 2


def test_a_call_that_is_not_counted_is_made_again_and_takes_nobodys_result():
    """Others that are in it, or past it, are no call ahead, and a rank that has yet to leave the
    call before is.
    """
    calls, again = calls_beside(1, "theirs"), []
    calls.call(dying(0, "the first"))
    assert calls.call(dying(1, "own"), lambda: again.append(1), counted=False) == "own"
    assert len(again) == 1
    assert calls.call(dying(1, "second")) == "second"  # not the others' result of the first call

    late = calls_beside(1, "theirs")
    assert late.call(dying(1, "never")) == "theirs"
    assert late.call(dying(1, "own"), counted=False) == "own"


def test_nobody_takes_the_result_of_another_call():
    with pytest.raises(AssertionError, match="2 calls ahead"):
        calls_beside(2, None).call(dying(1, "never"))


def test_what_no_death_explains_is_raised():
    def recover(error):
        raise error

    with pytest.raises(PeerFailedError):
        HostCalls(recover).call(dying(1, None))


def test_a_batch_that_begins_again_counts_once_for_the_broadcasts_of_buffers(monkeypatch):
    strategy, module = ElasticStrategy(), torch.nn.Module()
    module.register_buffer("count", torch.zeros(1))
    strategy.model = module
    strategy.buffers_state = 1, set()  # after a batch: now buffers are compared
    strategy._fit = SimpleNamespace(
        calls=calls_beside(0, None), step=SimpleNamespace(position=object())
    )
    die_once = dying(1, None)
    monkeypatch.setattr(ElasticStrategy, "_trainer", SimpleNamespace(accumulate_grad_batches=1))
    monkeypatch.setattr(ElasticStrategy, "is_survivable", True)
    comm = SimpleNamespace(world_size=2, all_gather_object=lambda mine, **_: [mine, mine])
    monkeypatch.setattr(ElasticStrategy, "_buffers_comm", comm)
    monkeypatch.setattr(ElasticStrategy, "and_barrier", lambda _, run: (run(), die_once()))
    strategy.on_train_batch_start(None, 1)
    assert strategy.buffers_state == (2, set())


def test_a_newcomer_of_shards_counts_a_checkpoint_as_the_others_do():
    """It has no shards when its loops are changed, and ranks with another count take another
    call's result.
    """
    calls = calls_beside(0, None)

    def save(path):
        calls.call(dying(0, path))  # the strategy's
        calls.call(dying(0, None))  # the Trainer's barrier

    strategy, fit = MagicMock(call_together=calls.call), MagicMock()
    strategy.algorithm.sharded, fit.recovery.parted = False, True
    strategy.fit_trainer.save_checkpoint = save
    change_loops(strategy, fit, ExitStack())
    strategy.fit_trainer.save_checkpoint("path")
    assert calls._count == 1
