"""Loops of Fabric on real ranks: ``strategy="ring"`` beside Fabric's own DDP."""

import warnings

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingFabricStrategy
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.monitor import RingMonitor
from tests.checks.loops import (
    RANK,
    SIZE,
    adamw,
    assert_same,
    batches,
    loss_of,
    names_in_timeline,
    network,
    pair,
    sgd,
)
from tests.refusals import refused

warnings.filterwarnings("ignore", module="lightning")


def launched(strategy="ring", **arguments):
    fabric = Fabric(strategy=strategy, accelerator="cpu", **arguments)
    fabric.launch()
    return fabric


def ddp(**arguments):
    devices = [torch.device("cpu")] * SIZE
    strategy = DDPStrategy(cluster_environment=RingEnvironment(), parallel_devices=devices)
    return launched(strategy, **arguments)


def small_buckets(algorithm):
    return RingFabricStrategy(algorithm=algorithm, bucket_cap_mb=0.0005)


def train(fabric, module, optimizer, steps=range(9)):
    """Three micro-batches a step, a clipped norm, and BatchNorm."""
    model, stepped = fabric.setup(module, optimizer)
    go_on(fabric, model, stepped, steps)


def go_on(fabric, model, optimizer, steps):
    inputs = batches(9)
    for step in steps:
        with fabric.no_backward_sync(model, enabled=step % 3 < 2):
            fabric.backward(loss_of(model(inputs[step])))
        if step % 3 == 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()


def check_a_loop_with_accumulation_and_clipping_equals_ddp():
    for algorithm, tolerance in (("ring", 0.0), ("ring_sharded", 1e-6)):
        found, expected = network(norm=True, seed=RANK), network(norm=True, seed=0)
        train(launched(small_buckets(algorithm)), found, sgd(found))
        train(ddp(), expected, sgd(expected))
        assert_same(found, expected, tolerance)


def check_modules_and_optimizers_that_are_set_up_one_by_one():
    trained = []
    for fabric in (launched(), ddp()):
        networks = pair()
        first, second = (fabric.setup_module(net) for net in networks)
        both = torch.optim.Adam([*networks[0].parameters(), *networks[1].parameters()], 0.05)
        optimizer = fabric.setup_optimizers(both)
        for noise in batches(4):
            loss_of(second(first(noise))).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(networks)
    for found, expected in zip(*trained, strict=True):
        assert_same(found, expected)
    fabric = launched("ring_sharded")
    networks = pair()
    for net in networks:
        fabric.setup_module(net)
    del net
    kept = [fabric.setup_module(net) for net in pair()]
    both = torch.optim.Adam([*kept[0].parameters(), *kept[1].parameters()])
    with refused("several modules that were set up one by one"):
        fabric.setup_optimizers(both)


def check_collectives():
    fabric = launched()
    assert (fabric.global_rank, fabric.world_size, fabric.local_rank) == (RANK, SIZE, RANK)
    mine = torch.tensor([float(RANK)])
    assert fabric.all_gather(mine).flatten().tolist() == list(range(SIZE))
    assert fabric.all_reduce(mine.clone(), reduce_op="sum").item() == sum(range(SIZE))
    assert fabric.all_reduce({"a": mine.clone()})["a"].item() == (SIZE - 1) / 2
    assert fabric.broadcast({"rank": RANK}, src=SIZE - 1) == {"rank": SIZE - 1}
    assert fabric.strategy.reduce_boolean_decision(RANK == 0) is (SIZE == 1)
    assert fabric.strategy.reduce_boolean_decision(RANK == 0, all=False) is True
    with fabric.rank_zero_first():
        pass
    fabric.barrier()


def check_checkpoints_go_on_as_if_nothing_had_happened(tmp_path):
    for algorithm in ("ring", "ring_sharded"):
        whole, saved, fresh = network(seed=1), network(seed=1), network(seed=8)
        train(launched(algorithm), whole, adamw(whole))
        fabric = launched(algorithm)
        model, optimizer = fabric.setup(saved, adamw(saved))
        go_on(fabric, model, optimizer, range(6))
        path = tmp_path / f"{algorithm}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 6})
        assert set(torch.load(path)["model"]) == set(saved.state_dict())  # no prefix
        fabric = launched(algorithm)
        model, optimizer = fabric.setup(fresh, adamw(fresh))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(path, state) == {}
        assert state["step"] == 6
        go_on(fabric, model, optimizer, range(6, 9))
        assert_same(fresh, whole)
        reference = ddp()  # opens it too
        model, optimizer = reference.setup(network(), adamw(network()))
        reference.load(path, {"model": model, "optimizer": optimizer}, strict=False)


def check_loaders_and_init_module_and_forward_methods():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(seed=RANK)

        def training_step(self, inputs):
            return loss_of(self.net(inputs))

    trained = []
    for fabric in (launched(precision="bf16-mixed"), ddp(precision="bf16-mixed")):
        data = TensorDataset(torch.randn(23, 6, generator=torch.Generator().manual_seed(0)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loader = fabric.setup_dataloaders(DataLoader(data, batch_size=3, shuffle=True))
        ours = isinstance(fabric.strategy, RingFabricStrategy) and RANK == 0
        assert any("23 samples do not divide" in str(one.message) for one in told) is ours
        assert loader.sampler.num_replicas == SIZE
        with fabric.init_module():
            module = Module()
        model, optimizer = fabric.setup(module, sgd(module))
        for _ in range(2):
            for (inputs,) in loader:
                fabric.backward(model.training_step(inputs))
                optimizer.step()
                optimizer.zero_grad()
        trained.append(module)
    assert_same(*trained)


def check_the_timeline_tells_of_steps(tmp_path):
    path = tmp_path / "trace.json"
    fabric = launched(RingFabricStrategy(timeline=path))
    model, optimizer = fabric.setup(net := network(), sgd(net))
    for inputs in batches(8):
        loss_of(model(inputs)).backward()
        optimizer.step()
    assert isinstance(fabric.strategy, RingFabricStrategy)
    fabric.strategy.timeline.finish()
    names_in_timeline(path, "step 7")
    with refused("Record a timeline instead"):
        launched(callbacks=[RingMonitor()]).setup(net := network(), sgd(net))
