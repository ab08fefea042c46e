"""Ray Train starts, places and watches the ranks; it runs here as it does on a cluster."""

import json
from pathlib import Path

import pytest

from tests.engines.loops import EPOCHS, KilledOnce, trained, weights_of_ddp
from tests.processes import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lightning-ring[ray]'")
pytest.importorskip("ray.train.torch", reason="Ray Train is not installed: ray[train]")

pytestmark = [pytest.mark.engines, pytest.mark.ranks]


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory):
    """Trained before the daemons' variables are set, with which its ranks would not be forked."""
    return weights_of_ddp(tmp_path_factory.mktemp("ddp") / "weights")


@pytest.fixture(scope="module")
def two_nodes():
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # of the daemons, and so of their workers
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray asks each node every 3 s whether it lives, and believes the fifth silence.
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # Tries after a node has gone may still wait for its place, for 20 s together.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")
        # It watches for cloud machines that will be taken away; each watcher imports for 2 s.
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        node = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def fit(folder, num_workers=2, **config):
    """What each worker's fit returned, by rank. ``config`` is that of `_loop`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    failures = FailureConfig(max_failures=1)
    TorchTrainer(
        _loop,
        train_loop_config={"folder": str(folder), "home": _node()} | config,
        scaling_config=ScalingConfig(num_workers=num_workers, placement_strategy="SPREAD"),
        run_config=RunConfig(name="fit", storage_path=str(folder), failure_config=failures),
    ).fit()
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*"))]


def _node():
    return ray.get_runtime_context().get_node_id()


def _loop(config):
    """``kill`` is "worker" or "node", the process of Ray that stands for a node: not of the
    node ``home``, which the driver is connected to.
    """
    from ray.train import get_checkpoint, get_context
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    folder = Path(config["folder"])
    snapshot, node = "checkpoint_manager_snapshot.json", config.get("kill") == "node"
    callbacks = [RayTrainReportCallback()]
    if config.get("kill"):
        away = get_context().get_world_rank() if _node() != config["home"] else None
        callbacks.append(KilledOnce(folder, snapshot, rank=away if node else 1, parent=node))
    checkpoint = get_checkpoint()
    start = None if checkpoint is None else f"{checkpoint.to_directory()}/checkpoint.ckpt"
    said = trained(
        config["strategy"],
        start,
        devices="auto",
        plugins=[RayLightningEnvironment()] if config.get("plugin") else [],
        callbacks=callbacks,
    )
    said |= {"resumed": start is not None, "node": _node()}
    (folder / f"rank{get_context().get_world_rank()}").write_text(json.dumps(said))


def test_a_killed_worker_starts_again_and_the_fit_has_the_bits_of_ddp(of_ddp, two_nodes, tmp_path):
    said = fit(tmp_path, strategy="ring", plugin=True, kill="worker")
    assert (tmp_path / "killed").exists()
    assert all(one["resumed"] for one in said)
    assert [one["rank"] for one in said] == [0, 1]
    assert len({one["node"] for one in said}) == 2
    assert said[0]["steps"] == EPOCHS * 6
    assert [one["weights"] for one in said] == [of_ddp] * 2


# the last one: it loses a node
def test_an_elastic_fit_of_two_workers_goes_on_without_a_lost_node(two_nodes, tmp_path):
    """Each node has room for one, which then takes both shards of the optimizer."""
    (said,) = fit(tmp_path, num_workers=(1, 2), strategy="ring_sharded", kill="node")
    assert (tmp_path / "killed").exists()
    assert (said["rank"], said["world_size"], said["resumed"]) == (0, 1, True)
    assert said["steps"] == 6 + (EPOCHS - 1) * 12, "the first epoch on two workers"
