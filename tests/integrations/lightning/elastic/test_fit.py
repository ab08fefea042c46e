"""`Trainer.fit` goes on when ranks are killed: in a step, in validation, in saving, at an
epoch's end; rank 0 too.
"""

import csv
import json
import math
import re

import pytest
import torch
from lightning.pytorch import callbacks

from lightning_ring.data import ShuffledSampler
from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from tests import forked
from tests.checks.trace_format import read_trace, slices
from tests.processes import RINGRUN, ROOT, elastic_command, run

RANK = str(ROOT / "tests" / "integrations" / "lightning" / "elastic" / "fitting_rank.py")
SAMPLES, BATCH, EPOCHS = 144, 4, 2
pytestmark = pytest.mark.ranks


def fit(folder, backend, *deaths, ranks=4, respawn=False, agent=False, **options):
    """The ends of those that live to the end, of 4 ranks."""
    folder.mkdir(exist_ok=True)
    command = elastic_command(
        ranks, RANK, str(folder), backend, *deaths, respawn=respawn, agent=agent
    )
    done = run(command, FIT=json.dumps(options))
    assert done.returncode == 0, done.stdout[-6000:]
    (folder / "output").write_text(done.stdout)
    return ends_in(folder)


def ends_in(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def trained_samples(folder):
    """By epoch, the samples of the steps that count: those of the last time that a step was done.

    A process that was killed may have read the batch of a step that the others had yet to begin. It
    counts where that process ended the step.
    """
    reads = {}  # step, attempt
    for log in folder.glob("*.log"):
        ended = max((step for step, _ in lines(log.with_suffix(".steps"))), default=0)
        for epoch, step, samples, attempt in lines(log):
            if step >= ended and not log.with_suffix(".json").exists():
                continue
            reads.setdefault(step, {}).setdefault(attempt, []).append((epoch, samples))
    trained = {}
    for by_attempt in reads.values():
        for epoch, samples in by_attempt[max(by_attempt)]:
            trained.setdefault(epoch, []).extend(samples)
    return trained


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def trained_batches(folder, number):
    """The steps of the batches of process ``number`` that count."""
    reads = lines(folder / f"{number}.log")
    last = {step: attempt for _, step, _, attempt in reads}
    return [step for _, step, _, attempt in reads if attempt == last[step]]


def check(folder, ends, world_size):
    # of two that come at about the same time either may be let in first
    assert sorted(end["rank"] for end in ends) == list(range(world_size))
    for end in ends:
        assert end["world_size"] == world_size
        assert end["epoch"] == EPOCHS
        for name in ("digest", "step", "lr", "batches"):
            assert end[name] == ends[0][name], name
        for name in ("val_loss", "loss_epoch", "seen"):
            assert end["metrics"][name] == pytest.approx(ends[0]["metrics"][name]), name
    # none that was taken back
    assert ends[0]["batches"] == len(trained_batches(folder, ends[0]["number"]))
    for samples in trained_samples(folder).values():
        assert len(set(samples)) == len(samples)  # none twice
        assert SAMPLES - len(samples) < 6 * BATCH  # none left out but for a remainder
    check_weights(folder)
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = [row for row in rows if row["ring/world_size"]]
    sizes, died, joined = (
        [float(row.get(f"ring/{name}") or 0) for row in told]
        for name in ("world_size", "deaths", "joins")
    )
    assert sizes[-1] == world_size == sizes[0] - (died[-1] - died[0]) + joined[-1]
    assert died[-1] + joined[-1] > 0 or len(set(sizes)) == 1
    # one for each optimizer
    norms = [name for name in rows[0] if name.startswith("ring/gradient_norm")]
    assert norms
    # RingMonitor goes on
    assert all(row["ring/step_ms"] for row in rows if any(row[name] for name in norms))
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    assert steps == sorted(set(steps)), steps
    # the line that a rank 0 had yet to write when it died
    assert len(set(range(ends[0]["step"])) - set(steps)) <= 1
    assert len(list((folder / "csv").iterdir())) == 1
    assert (folder / "checkpoints" / "last.ckpt").exists()


def check_weights(folder):
    """All ranks have the same after each step."""
    digests = {}
    for log in folder.glob("*.steps"):
        for step, digest in lines(log):
            assert digests.setdefault(step, digest) == digest, (log.name, step)


@pytest.mark.parametrize(
    ("backend", "deaths"),
    [
        ("auto", ["1:3:backward", "0:6:forward", "3:9:validation"]),  # rank 0 hands over its files
        ("gloo", ["3:4:batch_end", "0:8:save", "1:8:epoch_end"]),
        # before the first step; validation is the sanity check
        ("gloo", ["0:0:setup", "1:0:validation", "2:2:train_start", "3:3:epoch_start"]),
    ],
)
def test_a_fit_outlives_ranks(backend, deaths, tmp_path):
    ends = fit(tmp_path, backend, *deaths, ranks=2 + len(deaths))
    check(tmp_path, ends, 2)


@pytest.mark.parametrize(
    ("step", "accumulate", "samples"),
    [
        # a step of several batches. The others are in the first one, in the average of the loss
        # that they log
        (3, 2, 27 * BATCH),
        # an epoch's last step, of one batch. With two ranks there are two batches left
        (4, 2, 29 * BATCH),
        # an epoch's end, in validation. With two ranks there is one more batch left
        (9, 1, 29 * BATCH),
    ],
)
def test_a_rank_that_others_wait_for_does_what_they_do(step, accumulate, samples, tmp_path):
    """Process 2 dies behind ``step``; process 0 has yet to learn that all agreed to it. The others
    go on until they wait for these two."""
    options = {"trainer": {"accumulate_grad_batches": accumulate}, "strategy": {"monitor": False}}
    options |= {"late": [0, step], "samples": samples}
    ends = fit(tmp_path, "gloo", f"2:{step}:batch_end:late", ranks=3, **options)
    check_behind(tmp_path, ends, samples)


def check_behind(folder, ends, samples):
    assert len(ends) == 2
    for name in ("digest", "step", "batches"):
        assert len({end[name] for end in ends}) == 1, name
    for trained in trained_samples(folder).values():
        assert len(set(trained)) == len(trained)
        assert samples - len(trained) < 6 * BATCH


def test_a_rank_that_is_behind_at_two_deaths_plans_its_step_for_the_ranks_between_them(tmp_path):
    """Behind step 3 process 3 dies. All go on without it but process 0, which has yet to return
    from a barrier when process 2 dies too: in the next step, planned for three ranks with two
    batches. For four there was one left."""
    samples = 3 * 4 * 2 * BATCH + 6 * BATCH
    options = {"trainer": {"accumulate_grad_batches": 2}, "strategy": {"monitor": False}}
    options |= {"barrier": [0, 3], "samples": samples}
    ends = fit(tmp_path, "gloo", "3:3:batch_end", "2:3:forward:late", **options)
    check_behind(tmp_path, ends, samples)


def test_a_rank_that_is_still_at_the_first_death_at_the_second_ends_its_epoch_with_the_others(
    tmp_path,
):
    """Process 3 dies in the last step of an epoch of four ranks. For three there is one batch more,
    and the others have come to it when process 2 dies."""
    samples = 7 * 4 * BATCH + 3 * BATCH
    options = {"strategy": {"monitor": False, "resize_lr": "linear"}}
    options |= {"enters_late": 0, "samples": samples}
    ends = fit(tmp_path, "gloo", "3:6:step", "2:7:batch_end:late", **options)
    assert len({end["lr"] for end in ends}) == 1
    check_behind(tmp_path, ends, samples)


def test_a_step_of_several_batches_is_done_again_from_its_first_one(tmp_path):
    # in the second batch, noticed in a later collective; and in the middle of the averages, by rank
    # 0
    trainer = {"accumulate_grad_batches": 3}
    ends = fit(tmp_path, "gloo", "1:1:forward2", "0:3:backward2", trainer=trainer)
    check(tmp_path, ends, 2)


def test_a_loss_scaler_outlives_ranks(tmp_path):
    # float16 overflows: the first steps are skipped, and the scale is halved each time
    first = 2.0**20
    ends = fit(tmp_path, "gloo", "1:2:step", "2:9:backward", scaler=first)
    check(tmp_path, ends, 2)
    (scale,) = {end["scale"] for end in ends}
    skipped = math.log2(first / scale)
    assert 1 < skipped < 9
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        assert max(float(row["ring/skipped_steps"] or 0) for row in csv.DictReader(file)) == skipped


def test_a_newcomer_trains_on_as_the_others_do(tmp_path):
    # the first one is replaced before the training begins
    deaths = ("2:0:start", "1:3:backward", "0:8:forward")
    trace = tmp_path / "trace" / "trace.json"
    options = {"wait": 6, "newcomer": 4, "strategy": {"timeline": str(trace)}}
    ends = fit(tmp_path, "auto", *deaths, respawn=True, ranks=3, **options)
    check(tmp_path, [end for end in ends if end], len(ends))
    assert len(ends) >= 2
    assert lines(tmp_path / "3.log")[0][:2] == [0, 0]
    assert any(end["number"] == 4 for end in ends)  # it took the place of process 1
    events = read_trace(trace)
    of_newcomer, of_first = (
        [slice["name"] for slice in slices(events, "ranks", number)]
        for number in (4, ends[0]["number"])
    )
    assert of_newcomer[0].startswith("process 4 joined: 3 ranks after step")
    deaths = [name for name in of_first if "died" in name]
    told = " died: 2 ranks after step "
    assert deaths == [f"process 1{told}3", f"process 0{told}8"]
    assert len(slices(events, "steps", 4)) > 5
    text = (tmp_path / "csv" / "version_0" / "hparams.yaml").read_text()
    assert "lr: 0.01" in text  # the next rank 0 keeps what the first one wrote


@pytest.mark.parametrize(
    ("backend", "deaths"),
    [
        ("gloo", ["2:7:save"]),  # while rank 0 gets the shards: it joins after the next step
        ("auto", ["0:1:setup", "4:2:train_start", "3:3:epoch_start"]),
    ],
)
def test_a_newcomer_joins_ranks_that_have_shards_also_where_ranks_die_meanwhile(
    backend, deaths, tmp_path
):
    """Process 4 comes in the place of process 1."""
    options = {"sharded": True, "wait": 6, "newcomer": 4}
    ends = fit(tmp_path, backend, "1:3:backward", *deaths, respawn=True, **options)
    check(tmp_path, ends, len(ends))
    assert ("4" in str(deaths)) != (4 in {end["number"] for end in ends})


def test_a_newcomer_steps_several_optimizers_as_the_others_do(tmp_path):
    """With manual optimization. A rank steps twice in a batch."""
    options = {"manual": True, "wait": 12, "newcomer": 2}
    ends = fit(tmp_path, "gloo", "1:8:between", respawn=True, ranks=2, **options)
    check(tmp_path, ends, 2)
    assert [end["number"] for end in ends] == [0, 2]
    assert len(trained_batches(tmp_path, 2)) > 5


def test_gradients_of_an_earlier_training_step_are_there_when_the_next_is_done_again(tmp_path):
    ends = fit(tmp_path, "gloo", "1:7:between", ranks=3, manual="accumulates")
    check(tmp_path, ends, 2)
    seen = [one for end in ends for one in lines(tmp_path / f"{end['number']}.gradients")]
    twice = [gradients for step, *gradients in seen if step == 6]
    assert twice == [twice[0]] * 4  # two ranks, two attempts
    assert twice[0] != [0.0, 0.0]


def test_a_newcomer_gets_what_callbacks_keep_outside_their_states(tmp_path):
    """Which checkpoint came last, that one is due, how many batches to accumulate, and a count
    of a callback. Averaged weights are in the model during validation, and at the end; a rank dies
    there, and they are exchanged once.
    """
    kept = [
        f"ModelCheckpoint('{tmp_path}/last', monitor='rising', save_last=True)",
        f"ModelCheckpoint('{tmp_path}/link', monitor='higher', save_last='link')",
        f"ModelCheckpoint('{tmp_path}/late', monitor='late', every_n_train_steps=15, "
        "save_on_train_epoch_end=False)",
        "GradientAccumulationScheduler({0: 1, 1: 2})",
        "Counting()",
    ]
    if hasattr(callbacks, "EMAWeightAveraging"):
        kept.append("EMAWeightAveraging(use_buffers=False, decay=0.9)")
    options = {"callbacks": kept, "wait": 14, "newcomer": 3}
    ends = fit(tmp_path, "gloo", "1:12:validation", respawn=True, ranks=3, **options)
    check(tmp_path, ends, 3)
    assert [end["number"] for end in ends] == [0, 2, 3]
    assert len(list((tmp_path / "late").glob("*.ckpt"))) == 1


def test_a_newcomer_that_does_not_fit_is_turned_away_and_not_replaced(tmp_path):
    """Its model has a parameter more."""
    options = {"misfit": 2, "wait": 22, "newcomer": 2}
    (end,) = fit(tmp_path, "gloo", "1:20:forward", respawn=True, ranks=2, **options)
    assert (end["number"], end["world_size"], end["epoch"]) == (0, 1, EPOCHS)
    output = (tmp_path / "output").read_text()
    told = (
        "Process 2 cannot join, and the job goes on without, and starts no other in its place. "
        "ModelMismatchError: "
    )
    assert output.count(told) == 1
    assert "parameter more: rank 0: missing; rank 1: float32 (3,) on cpu" in output
    assert "process 2 ends: " in output
    assert not (tmp_path / "started3").exists()


@pytest.mark.parametrize(
    "failing",
    [{2: "on_load_checkpoint"}, {2: "setup", 3: "on_train_batch_start"}],
    ids=["alone", "in turn"],
)
def test_a_newcomer_that_fails_before_its_first_step_is_a_death(failing, tmp_path):
    """The next process takes its place, if it comes before the end."""
    callbacks = [f"Failing({number}, '{where}')" for number, where in failing.items()]
    options = {"callbacks": callbacks, "wait": 8, "newcomer": max(failing)}
    ends = fit(tmp_path, "gloo", "1:3:forward", respawn=True, ranks=2, **options)
    check(tmp_path, ends, len(ends))
    assert [end["number"] for end in ends] in ([0], [0, max(failing) + 1])
    output = (tmp_path / "output").read_text()
    for number in failing:
        failed = rf"process {number} \(pid \d+\) ended with exit code 1"
        assert re.search(rf"{failed} \(process {number} .*only this", output)


def grow(ranks, folder, *asked, **options):
    """A fit of ``ranks``, and of one more once process 0 trains."""
    slots = f"sh -c 'echo localhost:$(({ranks} + $(ls {folder} | grep -c ^0.log)))'"
    ringrun = [*RINGRUN, "-n", str(ranks), "--max-ranks", str(ranks + 1), "--discover", slots]
    script = [*forked.python(), RANK, str(folder), "gloo", *asked]
    return run([*ringrun, *script], FIT=json.dumps({"wait": 3, "newcomer": ranks} | options))


def test_callbacks_communicate_in_every_hook_while_a_process_joins(tmp_path):
    done = grow(2, tmp_path, callbacks=["CollectiveInEveryHook()"])
    assert done.returncode == 0, done.stdout[-6000:]
    check(tmp_path, ends_in(tmp_path), 3)


@pytest.mark.parametrize("asked", ["0:8:sigterm", "1:join:sigterm"], ids=["old", "new"])
def test_a_rank_that_began_alone_trains_on_with_a_newcomer_until_one_is_asked_to_stop(
    asked, tmp_path
):
    done = grow(1, tmp_path, asked)
    assert "generation 0: 1 rank, after 0 steps" in done.stdout
    assert "2 ranks, 1 of them new" in done.stdout
    assert done.returncode == 143
    assert "asked to stop (SIGTERM), and did so at the same step" in done.stdout
    assert not ends_in(tmp_path)
    check_weights(tmp_path)


def test_a_process_waits_where_stochastic_weight_averaging_cannot_take_it_in(tmp_path):
    """It would train with another schedule."""
    averaging = "StochasticWeightAveraging(0.01, swa_epoch_start=1)"
    options = {"callbacks": [averaging], "wait": 6, "newcomer": 3}
    ends = fit(tmp_path, "gloo", "1:2:backward", respawn=True, ranks=3, **options)
    assert_0_and_2_are_left(ends)
    assert len({end["digest"] for end in ends}) == 1
    assert (
        "waits to join, and cannot: StochasticWeightAveraging" in (tmp_path / "output").read_text()
    )


def assert_0_and_2_are_left(ends):
    left = [(end["number"], end["rank"], end["world_size"]) for end in ends]
    assert left == [(0, 0, 2), (2, 1, 2)]


@pytest.mark.parametrize(
    ("backend", "options", "ranks", "deaths"),
    [
        # one rank less on each node
        ("auto", {"nodes": 2}, 6, ["1:6:forward", "0:6:backward"]),
        ("auto", {"sharded": True}, 3, ["1:12:step"]),
        # parameters that follow others in training_step have done so when the rank dies
        ("gloo", {"momentum": True}, 3, ["1:12:forward"]),
        # one of two optimizers has stepped
        ("gloo", {"manual": True}, 3, ["1:25:between"]),
    ],
)
def test_survivors_compute_what_fewer_ranks_compute_from_that_state(
    backend, options, ranks, deaths, tmp_path
):
    (first, fresh) = (tmp_path / "first", tmp_path / "fresh")
    topology = {"topology": "hierarchical"} if "nodes" in options else {}
    options = options | {"dropout": 0.0, "strategy": {"resize_lr": "linear"} | topology}
    ends = fit(first, backend, *deaths, ranks=ranks, **options)
    check(first, ends, left := ranks - len(deaths))
    (checkpoint,) = (first / "checkpoints").glob("epoch=0-*.ckpt")
    saved = torch.load(checkpoint, weights_only=False)
    groups = [
        group for optimizer in saved["optimizer_states"] for group in optimizer["param_groups"]
    ]
    for group in (*groups, *saved["lr_schedulers"]):
        for name in {"lr", "initial_lr"} & set(group):
            group[name] *= left / ranks
        for name in {"base_lrs", "_last_lr"} & set(group):
            group[name] = [rate * left / ranks for rate in group[name]]
    torch.save(saved, checkpoint)
    again = fit(fresh, backend, ranks=left, resume=str(checkpoint), **options)
    assert {end["digest"] for end in ends} == {end["digest"] for end in again}


def test_a_fit_that_goes_on_within_an_epoch_trains_once_on_what_is_left_of_it(tmp_path):
    """With fewer ranks than the checkpoint's, of which one dies in that epoch."""
    first, second = tmp_path / "first", tmp_path / "second"
    options = {"loader": True, "trainer": {"max_epochs": 1, "val_check_interval": 4}}
    fit(first, "gloo", **options)
    checkpoint = str(first / "checkpoints" / "epoch=0-step=4.ckpt")
    ends = fit(second, "gloo", "1:6:forward", ranks=3, resume=checkpoint, **options)
    order = [*ShuffledSampler(SAMPLES, remainder="drop", seed=3)]
    check_behind(second, ends, SAMPLES - (before := 4 * 4 * BATCH))
    assert set(trained_samples(second)[0]) <= set(order[before:])


@pytest.mark.skipif(
    not reachable_candidates({}), reason="this host has no address but its own loopback"
)
def test_a_job_that_has_lost_a_shard_goes_on_from_its_last_checkpoint_by_itself(tmp_path):
    """Rank 3, on another host, is the mirror of rank 1. The two others end with the bits of a
    fresh job from that checkpoint."""
    first, fresh = tmp_path / "first", tmp_path / "fresh"
    options = {"dropout": 0.0, "sharded": True}
    ends = fit(first, "auto", "1:10:forward", "3:10:forward", agent=True, **options)
    assert_0_and_2_are_left(ends)
    (checkpoint,) = (first / "checkpoints").glob("epoch=0-*.ckpt")
    again = fit(fresh, "auto", ranks=2, resume=str(checkpoint), **options)
    assert {end["digest"] for end in ends} == {end["digest"] for end in again}
    assert {end["step"] for end in ends} == {end["step"] for end in again} == {9 + 18}
