"""`ParameterServer` against its formulas in one process. Ranks are threads, but for the last
test.
"""

import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW
from torch.testing import assert_close

from lightning_ring import ElasticStrategy, RingStrategy
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.server import ParameterServer
from lightning_ring.errors import CollectiveError, RingError
from lightning_ring.optim import LARS
from tests import forked
from tests.algorithms.local_training import begin, loss, network, one_step, vector
from tests.battery import check_names
from tests.processes import run
from tests.refusals import refused
from tests.thread_ranks import run_ranks

MODULE = "tests.checks.server"
NUM_STEPS = 7
OPTIMIZERS = {
    "sgd": lambda net: SGD(net.parameters(), 0.05, momentum=0.9),
    "adamw": lambda net: AdamW(
        [{"params": [*net.parameters()][:2], "lr": 0.02}, {"params": [*net.parameters()][2:]}]
    ),
    "lars": lambda net: LARS(net.parameters(), 0.5, momentum=0.9),  # norms of whole tensors
    "adafactor": lambda net: Adafactor(net.parameters(), 0.05),  # rows and columns of whole tensors
}


def sequential(optimizer, world_size, lr=None):
    """One process that steps the mean of all ranks' gradients."""
    net = network()
    steps = OPTIMIZERS[optimizer](net)
    for step in range(NUM_STEPS):
        steps.zero_grad()
        (
            torch.stack([loss(net, rank, step) for rank in range(world_size)]).sum() / world_size
        ).backward()
        steps.step()
        if lr is not None:
            steps.param_groups[0]["lr"] = lr(step)
    return vector(net), steps.state_dict()


@pytest.mark.parametrize(
    ("world_size", "servers"), [(2, None), (3, None), (3, 1), (4, 2), (5, None)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bulk_is_the_step_with_the_mean_in_one_process(world_size, optimizer, servers):
    def rank(comm):
        net, algorithm = network(), ParameterServer(servers)
        steps = OPTIMIZERS[optimizer](net)
        algorithm.attach(net, [steps], comm)
        for step in range(NUM_STEPS):
            one_step(net, steps, algorithm, comm.rank)
            steps.param_groups[0]["lr"] = 0.01 * (step + 1)
            for _ in range(step % 3):  # nothing changes in between
                algorithm.show_averages()
        saved = algorithm.optimizer_state_dict(steps, is_rank_zero=comm.rank == 0)
        with refused("is with the parameter servers"):
            steps.state_dict()
        algorithm.detach()
        return vector(net), saved, steps.state_dict()

    found = run_ranks(world_size, rank)
    expected, state = sequential(optimizer, world_size, lambda step: 0.01 * (step + 1))
    for weights, _, after in found:
        assert torch.equal(weights, found[0][0])
        assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        assert_close(after["state"], state["state"], rtol=1e-4, atol=1e-6)
    assert found[1][1] == {}
    assert found[0][1]["param_groups"] == state["param_groups"]
    assert_close(found[0][1]["state"], state["state"], rtol=1e-4, atol=1e-6)


def test_a_closure_an_unused_and_a_frozen_parameter():
    """As one process does it: an unused parameter and a frozen one keep their values."""

    def trained(algorithm, comm, ranks):
        net = network()
        net.extra = nn.Parameter(torch.ones(2))
        net.empty = nn.Parameter(torch.ones(0, 2))  # which has momentum too
        net[0].bias.requires_grad_(False)
        steps = SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        algorithm.attach(net, [steps], comm)
        for step in range(6):
            algorithm.begin_batch()
            algorithm.before_step(steps, has_closure=True)

            def closure(step=step):
                steps.zero_grad()
                value = (
                    torch.stack([loss(net[:3], rank, step) for rank in ranks]).mean()
                    + net.empty.sum()
                )
                value.backward()
                return value

            assert steps.step(closure) is not None
            algorithm.after_step(steps)
        algorithm.detach()
        assert len(steps.state) == 4
        return vector(net)

    expected = trained(Algorithm(), None, range(2))
    for found in run_ranks(2, lambda comm: trained(ParameterServer(), comm, [comm.rank])):
        assert_close(found, expected)
        assert torch.equal(found[:2], torch.ones(2))  # the extra one comes first


def test_a_rank_without_a_batch_is_an_error_in_bulk_mode():
    def rank(comm):
        algorithm = ParameterServer()
        net, steps = begin(algorithm, comm)
        for _ in range(3 + comm.rank):
            one_step(net, steps, algorithm, comm.rank)
        algorithm.show_averages()

    with pytest.raises(
        CollectiveError, match="rank 1 took a step, while rank 0 had ended its epoch"
    ):
        run_ranks(2, rank)


@pytest.mark.parametrize("mode", ["bulk", "async"])
def test_a_request_to_stop_is_met_by_all_ranks(mode):
    """Also while one rank is already at the end of its epoch, where nobody can stop: at the next
    step of all.
    """

    def rank(comm):
        algorithm, stops = ParameterServer(mode=mode), []
        net, steps = begin(algorithm, comm)
        for epoch, batches in enumerate(
            ((6, 6), (2, 6), (6, 6)) if mode != "bulk" else ((6, 6),) * 3
        ):
            for step in range(batches[comm.rank]):
                if algorithm.agreed_to_stop():
                    stops.append((epoch, step))
                    comm.barrier()  # what the strategy does then is collective
                if (epoch, step, comm.rank) == (1, 4, 1):
                    algorithm.ask_to_stop()
                one_step(net, steps, algorithm, comm.rank)
                algorithm.ask_to_stop(False)
            algorithm.show_averages()
        algorithm.detach()
        return stops

    found = run_ranks(2, rank)
    if mode == "bulk":
        assert found == [[(1, 5)], [(1, 5)]]
    else:  # rank 0 learns of it with its next step
        assert found in ([[(2, 0)], [(2, 0)]], [[(2, 1)], [(2, 0)]])


def test_changes_by_other_code_are_an_error():
    def rank(comm):
        algorithm = ParameterServer()
        net, steps = begin(algorithm, comm)
        one_step(net, steps, algorithm, comm.rank)
        with torch.no_grad():
            net[0].bias.clamp_(-0.1, 0.1)
        one_step(net, steps, algorithm, comm.rank)

    with pytest.raises(RingError, match="parameters were changed since the last step"):
        run_ranks(2, rank)


def test_a_state_of_which_servers_would_not_learn_is_an_error():
    def rank(comm):
        algorithm = ParameterServer()
        net, steps = begin(algorithm, comm, "adamw")
        one_step(net, steps, algorithm, comm.rank)
        saved = comm.broadcast_object(
            algorithm.optimizer_state_dict(steps, is_rank_zero=comm.rank == 0)
        )
        steps.load_state_dict(saved)
        one_step(net, steps, algorithm, comm.rank)

    with pytest.raises(RingError, match="state was replaced"):
        run_ranks(2, rank)


def test_an_error_of_the_servers_optimizer_ends_the_job():
    class Failing(SGD):
        def step(self, closure=None):
            if any(param.grad is not None for param in self.param_groups[0]["params"]):
                raise ValueError("no such step")

    def rank(comm):
        net, algorithm = network(), ParameterServer(1)
        steps = Failing(net.parameters(), 0.1)
        algorithm.attach(net, [steps], comm)
        one_step(net, steps, algorithm, comm.rank)

    with pytest.raises(CollectiveError, match="ValueError: no such step"):
        run_ranks(2, rank)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParameterServer(0), "servers=0"),
        (lambda: ParameterServer(mode="stale"), "mode='stale', .* mode 'bulk' or 'async'"),
        (lambda: ParameterServer(delay_compensation=0.1), "mode='bulk', .* and with 'async'"),
        (
            lambda: ParameterServer(mode="async", delay_compensation=0),
            "a delay_compensation above 0",
        ),
        (
            lambda: RingStrategy(algorithm=ParameterServer(), uneven="join"),
            "uneven='join' with algorithm=Parameter",
        ),
        (
            lambda: ElasticStrategy(algorithm=ParameterServer()),
            "ElasticStrategy was built.*ParameterServer keeps state",
        ),
        (
            lambda: RingStrategy(algorithm=ParameterServer(), compression="int8"),
            "compression beside algorithm=Param",
        ),
        (
            lambda: RingStrategy(algorithm=ParameterServer(mode="async"), broadcast_buffers="step"),
            "broadcast_buffers='step' with algorithm=ParameterServer",
        ),
        (lambda: attached(ParameterServer(3)), "servers=3, and the job has 2"),
        (
            lambda: attached(ParameterServer(), 2),
            "ParameterServer got the optimizer.s. SGD, SGD, and",
        ),
        (lambda: attached(ParameterServer(), kind=torch.optim.LBFGS), "LBFGS, and its servers"),
        (lambda: attached(ParameterServer(), kind=torch.optim.SparseAdam), "not LBFGS or Sparse"),
        (
            lambda: ParameterServer().clip_grad_norm_([], 1.0),
            "clipped by their norm, but ParameterServer.mode='bulk'",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with refused(words):
        make()


def attached(algorithm, num_optimizers=1, kind=SGD):
    def rank(comm):
        net = network()
        algorithm.attach(net, [kind(net.parameters(), 0.1) for _ in range(num_optimizers)], comm)

    run_ranks(2, rank)


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_real_ranks(battery, check):
    battery(MODULE, 2, check)  # of which bulk mode has the bits of "ring"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arguments", "victim", "step"), [("1, 'bulk'", 0, 3), ("1, 'async'", 1, 3)]
)
def test_a_killed_rank_ends_the_job(arguments, victim, step, tmp_path):
    """The only server, and a worker that nobody waits for."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, torch\n"
        "from lightning_ring import distribute\n"
        "from lightning_ring.algorithms.server import ParameterServer\n"
        "net = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        f"with distribute(net, optimizer, algorithm=ParameterServer({arguments})) as training:\n"
        "    for step in range(1000):\n"
        f"        if step == {step} and training.rank == {victim}:\n"
        "            time.sleep(0.3)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        net(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        time.sleep(0.01)\n"
        "print('the end')\n"
    )
    ringrun = ["-m", "lightning_ring.cli.ringrun", "--no-mpi", "-n", "3"]
    done = run([sys.executable, *ringrun, str(script)], **forked.ranks())
    assert done.returncode == 137, done.stdout
    assert "the end" not in done.stdout
    assert f"rank {victim} (host" in done.stdout
