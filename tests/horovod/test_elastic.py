"""`hvd.elastic`: ranks that die and come, and what a state keeps."""

import importlib
import json
import sys
from collections import Counter

import pytest
import torch

import lightning_ring.horovod as hvd
from lightning_ring.horovod.elastic import sampler as sampler_module
from tests import forked
from tests.processes import ON_THIS_HOST, RINGRUN, ROOT, executable, run

# the package names the function
run_module = importlib.import_module("lightning_ring.horovod.elastic.run")
SCRIPT = str(ROOT / "tests" / "horovod" / "elastic_script.py")
EVERY_SAMPLE = {(epoch, index) for epoch in range(2) for index in range(48)}


def elastic_job(folder, *options, size, deaths, **env):
    ringrun = [*RINGRUN, *options, sys.executable, "-m", "lightning_ring.horovod", SCRIPT]
    done = run([*ringrun, str(folder), str(size), deaths], **forked.ranks(), **env)
    assert done.returncode == 0, done.stdout
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    first = next(iter(found.values()))
    for one in found.values():
        assert one["result"] == "trained"
        for name in ("weights", "momentum", "used"):
            assert one[name] == first[name], name
        assert one["sum"] == one["size"] == len(found), "collectives go on after the training"
    used = Counter(map(tuple, first["used"]))
    assert set(used) == EVERY_SAMPLE
    assert max(used.values()) <= 2, "twice only where the rest is not divisible by the ranks"
    return found


@pytest.mark.ranks
def test_rank_0_dies_the_others_go_back_to_the_last_commit_and_a_new_process_joins(tmp_path):
    found = elastic_job(tmp_path, "-np", "3", "--min-np", "2", "--respawn", size=3, deaths="0:0:2")
    assert set(found) == {"1", "2", "3"}
    killed = float((tmp_path / "killed").read_text())
    for number in ("1", "2"):
        rank = int(number) - 1
        assert found[number]["resets"] == [[rank, 2], [rank, 3]]
        [(kind, when)] = found[number]["errors"]
        assert kind in ("RanksChanged", "HorovodInternalError")
        assert when - killed < 60, "it waited for a timeout"
    assert found["3"]["resets"] == found["3"]["errors"] == []


@pytest.mark.ranks
def test_the_last_rank_of_two_hosts_goes_on_alone(tmp_path):
    """Between hosts the collectives are Gloo's; alone an optimizer reduces nothing."""
    options = ["-H", "localhost:1,elsewhere:1", "--min-np", "1"]
    ssh = executable(tmp_path / "ssh", ON_THIS_HOST)
    found = elastic_job(tmp_path, *options, size=2, deaths="0:1:3", RING_SSH=ssh)
    assert set(found) == {"1"}
    assert found["1"]["resets"] == [[0, 1]]
    assert len(found["1"]["errors"]) == 1


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def test_a_sampler_deals_out_the_rest_of_an_epoch(monkeypatch):
    def samplers(size, state=None):
        found = []
        for rank in range(size):
            monkeypatch.setattr(sampler_module, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(sampler_module, "size", lambda: size)
            found.append(hvd.elastic.ElasticSampler(range(26), seed=3))
            if state is not None:
                found[-1].load_state_dict(state)
        return found

    three = samplers(3)
    taken = [index for one in three for index in list(one)[:4]]
    assert len(set(taken)) == 12
    for one in three:
        one.record_batch(0, 4)
    assert three[0].state_dict() == {"epoch": 0, "processed_num": 12}
    two = samplers(2, three[0].state_dict())
    assert {len(one) for one in two} == {7}
    assert sorted(taken + [index for one in two for index in one]) == list(range(26))
    two[0].record_indices(list(two[0])[:3])
    one = samplers(1, two[0].state_dict())[0]
    assert len(one) == 11
    assert not set(one) & two[0].processed_indices
    for state, share in ((one.state_dict(), 3), ({"epoch": 0, "processed_num": 25}, 1)):
        assert [len(list(each)) for each in samplers(4, state)] == [share] * 4
    one = samplers(1)[0]
    before = list(one)
    one.set_epoch(1)
    assert sorted(one) == list(range(26))
    assert list(range(26)) != list(one) != before


@pytest.mark.usefixtures("alone")
def test_a_state_goes_back_to_its_last_commit():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, best=[1])

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    def values():
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        return model.weight.item(), momentum.item(), state.epoch, state.best

    step()
    state.epoch, state.best = 1, [2]
    state.commit()
    kept = values()
    for _ in range(2):  # what is restored is not the kept copy itself
        step()
        state.epoch = 7
        state.restore()
        assert values() == kept
    other = torch.nn.Linear(1, 1, bias=False)
    state.model = other
    kept = other.weight.item()
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert state.model is other
    assert other.weight.item() == kept


@pytest.mark.usefixtures("alone")
def test_an_error_is_raised_in_a_job_that_does_not_go_on_when_ranks_die():
    @hvd.elastic.run
    def train(state):
        raise hvd.HorovodInternalError("wrong")

    with pytest.raises(hvd.HorovodInternalError, match="wrong"):
        train(hvd.elastic.TorchState(batch=0))


def test_an_error_that_no_death_explains_is_raised_after_some_attempts(monkeypatch):
    class Views:
        has_state = False
        members = (0, 1)

        def is_over(self, error):
            return isinstance(error, hvd.HorovodInternalError)

    class Nothing(hvd.elastic.State):
        def sync(self):
            calls.append("sync")

        restore = save = lambda self: None

    views, calls = Views(), []
    monkeypatch.setattr(run_module, "elastic_views", lambda: views)

    def train(state):
        calls.append("train")
        raise hvd.HorovodInternalError("shapes differ")

    def meet():
        if calls.count("train") == 3:
            views.members = (0, 1, 2)  # somebody came: the count begins anew

    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        run_module.run_fn(train, meet)(Nothing(lambda value: value, lambda: 0))
    assert calls == ["sync", "train"] * (3 + 6)
    assert views.has_state
