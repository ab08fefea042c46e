"""Plain loops through `distribute` on real ranks, beside torch's DistributedDataParallel."""

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ring import distribute
from lightning_ring.errors import ConfigurationError, ModelMismatchError, RingError
from tests.checks.ranks import WORLD
from tests.refusals import refused

RANK, SIZE = WORLD.rank, WORLD.size
torch.set_num_threads(1)


def network(*, norm=False, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Linear(16, 3)
    )


def batches(number):
    """Other ones on each rank."""
    numbers = torch.Generator().manual_seed(100 + RANK)
    return [torch.randn(8, 6, generator=numbers) for _ in range(number)]


def loss_of(output):
    return (output - 0.5).square().mean()


def train(forward, *optimizers, number=4):
    for inputs in batches(number):
        loss_of(forward(inputs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adversaries(generate, judge, optimizers):
    """A GAN: each network has a loss of its own; the generator's passes through the other one."""
    for inputs in batches(5):
        real, noise = inputs[:, :3].contiguous(), inputs
        optimizers[1].zero_grad()
        loss_of(judge(real)).add(judge(generate(noise).detach()).square().mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss_of(judge(generate(noise))).backward()
        optimizers[0].step()


def pair():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)), nn.Sequential(
        nn.Linear(3, 12), nn.Linear(12, 1)
    )


def assert_same(found, expected, tolerance=0.0):
    """Bit for bit on two ranks, with ``found`` equal on all ranks. DDP's buffers are those of
    rank 0.
    """
    mine = (
        torch.cat([value.double().reshape(-1) for value in found.state_dict().values()])
        .numpy()
        .tobytes()
    )
    assert len(set(WORLD.allgather(mine))) == 1
    pairs = zip(found.named_parameters(), expected.parameters(), strict=True)
    named = [(name, one, other) for (name, one), other in pairs]
    if RANK == 0:
        named += [(name, one, expected.get_buffer(name)) for name, one in found.named_buffers()]
    for name, one, other in named:
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance if SIZE <= 2 else 1e-6, msg=name
        )


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def check_two_modules_equal_ddp():
    for algorithm in ("ring", "ring_sharded"):
        one, other = pair(), pair()
        optimizers = [torch.optim.Adam(module.parameters(), lr=0.05) for module in one]
        with (
            distribute(one[0], optimizers[0], algorithm=algorithm, bucket_cap_mb=0.0002),
            distribute(one[1], optimizers[1], algorithm=algorithm, bucket_cap_mb=0.0002),
        ):
            wrapped = [DistributedDataParallel(module) for module in other]
            adversaries(
                *wrapped, [torch.optim.Adam(module.parameters(), lr=0.05) for module in other]
            )
            adversaries(*one, optimizers)
        for found, expected in zip(one, other, strict=True):
            assert_same(found, expected, tolerance=0.0 if algorithm == "ring" else 1e-6)


class _Halves(nn.Module):
    """Its first layer, whose gradient comes last, is used on rank 0 alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.some, self.every = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs):
        hidden = self.some(inputs) if RANK == 0 else inputs
        return self.every(hidden)


def check_one_backward_through_two_modules_sends_in_one_order():
    first, last = pair()[0], _Halves()
    reference = nn.Sequential(copy.deepcopy(first), copy.deepcopy(last))
    optimizers = [sgd(first), sgd(last)]
    with (
        distribute(first, optimizers[0], bucket_cap_mb=0.0001),
        distribute(last, optimizers[1], bucket_cap_mb=0.00002),
    ):
        wrapped = DistributedDataParallel(reference, find_unused_parameters=True)
        plain = sgd(reference)
        train(wrapped, plain)
        train(lambda inputs: last(first(inputs)), *optimizers)
    assert_same(nn.Sequential(first, last), reference)


def check_collectives():
    model = network()
    with distribute(model, sgd(model)) as training:
        mean = training.all_reduce(torch.tensor([float(RANK), 1.0]))
        assert mean.tolist() == [(SIZE - 1) / 2, 1.0]
        assert training.all_gather(torch.tensor(RANK)).tolist() == list(range(SIZE))
        assert training.broadcast({"rank": RANK}, src=SIZE - 1) == {"rank": SIZE - 1}


def check_rank_0_alone_may_evaluate_and_save_between_steps():
    model = network(norm=True)
    optimizer = sgd(model)
    with distribute(model, optimizer, algorithm="ring_sharded"):
        for inputs in batches(4):
            train(model, optimizer, number=1)
            if RANK == 0:  # the new parameters may still be on their way
                with torch.no_grad():
                    model.eval()
                    loss_of(model(inputs))
                    model.train()
                copy.deepcopy(model.state_dict())


def check_a_thawed_module_that_is_not_called_whole_is_an_error():
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with distribute(model, optimizer) as training:
        loss_of(model(batches(1)[0])).backward()
        optimizer.step()
        model[0].requires_grad_(True)
        # the module itself is not called
        loss_of(model[2](model[1](model[0](batches(1)[0])))).backward()
        with pytest.raises(
            RingError, match=r"0\.weight with a gradient of this rank alone.*call the whole module"
        ):
            optimizer.step()
        training.barrier()


def check_modules_that_change_during_the_training_are_an_error():
    """What would step other values than the averages, without a word: by a message, on every
    rank.
    """

    def unaveraged(training, net, optimizer, *closure):
        with training.no_sync():
            loss_of(net(batches(1)[0])).backward()
        optimizer.step(*closure)

    def without_a_closure(*arguments):
        unaveraged(*arguments, None)

    def swapped(training, net, optimizer):
        torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.ones(16, 6)))

    def converted(training, net, optimizer):
        training.wait_parameters()
        net.double()
        loss_of(net(batches(1)[0].double())).backward()

    def replaced(training, net, optimizer):
        training.wait_parameters()
        nn.utils.parametrizations.weight_norm(net[0])
        optimizer.add_param_group({"params": list(net[0].parametrizations.parameters())})
        net(batches(1)[0])

    def later(training, net, optimizer):
        net.append(nn.Linear(3, 2))
        another = torch.optim.SGD(net[-1].parameters(), lr=0.1)
        loss_of(net(batches(1)[0])).backward()
        another.step()

    cases = [
        (unaveraged, RingError, r"the last backward was inside no_sync\(\)"),
        (without_a_closure, RingError, r"the last backward was inside no_sync\(\)"),
        (swapped, RuntimeError, "Cannot swap"),
        (converted, RingError, "has become torch.float64, but was torch.float32"),
        (later, RingError, r"training.add_optimizers\(\[optimizer\]\)"),
        (
            replaced,
            ConfigurationError,
            "original1 and an earlier 0.weight are two tensors in the same memory",
        ),
    ]
    for algorithm in ("ring", "ring_sharded"):
        for change, kind, message in cases[: 5 + (algorithm == "ring_sharded")]:
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with distribute(net, optimizer, algorithm=algorithm) as training:
                train(net, optimizer, number=2)
                with pytest.raises(kind, match=message):
                    change(training, net, optimizer)
                optimizer.zero_grad()


def check_a_compiled_module_trains_and_its_state_is_whole():
    results = []
    for algorithm in ("ring", "ring_sharded"):
        model = network()
        compiled = torch.compile(model, backend="eager")
        optimizer = adamw(model)
        with distribute(compiled, optimizer, algorithm=algorithm):
            for _ in range(3):
                train(compiled, optimizer, number=1)
                states = compiled.state_dict(), model.state_dict()
                assert all(map(torch.equal, *(state.values() for state in states)))
        results.append(model)
    assert_same(*results)


def check_a_copy_of_a_module_is_plain_and_whole():
    for algorithm in ("ring", "ring_sharded"):
        model = network()
        optimizer = adamw(model)
        with distribute(model, optimizer, algorithm=algorithm) as training:
            average = torch.optim.swa_utils.AveragedModel(model)
            for _ in range(3):
                train(model, optimizer, number=1)
                if algorithm == "ring_sharded":
                    with pytest.raises(RuntimeError, match=r"wait_parameters\(\)"):
                        copy.deepcopy(model)
                    training.wait_parameters()
                average.update_parameters(model)
            copied, file = copy.deepcopy(model), io.BytesIO()
            torch.save(model, file)
            assert b"lightning_ring" not in file.getvalue()
            file.seek(0)
            copies = [copied, torch.load(file, weights_only=False), copy.deepcopy(copied)]
            expected = [param.detach().clone() for param in model.parameters()]
            for each in copies:
                assert all(map(torch.equal, each.parameters(), expected))
                assert all(type(param) is nn.Parameter for param in each.parameters())
            if RANK == 0:  # alone
                for each in (*copies, average):
                    loss_of(each(batches(1)[0])).backward()
                    sgd(each).step()
            assert all(map(torch.equal, model.parameters(), expected))
            training.barrier()


def check_sharded_optimizers_of_several_modules_of_none_and_used_again():
    one, other = pair()
    both = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    with distribute(one, both, algorithm="ring_sharded"):
        with refused("several modules that were set up one by one"):
            distribute(other, both, algorithm="ring_sharded")
        loss_of(one(batches(1)[0])).backward()
        both.step()
    with refused(r"optimizer_state_dict\(optimizer\), and hand it to"):
        distribute(one, both, algorithm="ring_sharded")
    frozen = network().requires_grad_(False)
    optimizer = adamw(frozen)
    with distribute(frozen, optimizer, algorithm="ring_sharded") as training:
        frozen(batches(1)[0])
        optimizer.step()
        training.clip_grad_norm_(frozen.parameters(), 1.0)
        training.optimizer_state_dict(optimizer)
    assert_same(frozen, network())


def check_what_cannot_work_is_an_error_on_every_rank():
    with pytest.raises(ModelMismatchError, match="the ranks hold different models"):
        distribute(nn.Linear(2 + RANK, 1))
    model = network()
    with distribute(model, sgd(model)) as training:
        with refused(r"0\.weight, which a module of an earlier call contains"):
            distribute(model)
        with refused("share their connections"):
            distribute(nn.Linear(2, 1), topology="flat")
        with refused("op='median', expected one of 'sum', 'mean'"):
            training.all_reduce(torch.zeros(1), op="median")
    training.close()  # twice is fine


def check_a_timeline_is_written(tmp_path):
    model = network()
    optimizer = sgd(model)
    path = tmp_path / "trace.json"
    other = nn.Linear(3, 1)
    with distribute(model, optimizer, timeline=path), distribute(other):
        with refused("the first one's timeline records all"):
            distribute(nn.Linear(1, 1), timeline=path)
        for inputs in batches(3):
            loss_of(other(model(inputs))).backward()
            optimizer.step()
    assert names_in_timeline(path, "step 2").count("forward") == 2 * 3 * SIZE


def names_in_timeline(path, last_step):
    WORLD.Barrier()
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    for name in ("forward", "optimizer step", last_step, "all-reduce"):
        assert names.count(name) >= SIZE, (name, sorted(set(names)))
    return names
