"""The command line of horovodrun, given to ringrun."""

import shlex
import socket
from pathlib import Path

import pytest

from lightning_ring.cli import ringrun
from lightning_ring.cli.horovodrun import INSTEAD, variables

# what horovodrun 0.28.1 takes (`horovod/runner/launch.py`), besides --version
OPTIONS = """-np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun"""


def parser():
    return ringrun._parser()


def test_every_option_of_horovodrun_is_known():
    known = {name for action in parser()._actions for name in action.option_strings}
    options = set(OPTIONS.split())
    assert options <= known
    assert set(INSTEAD) <= options


@pytest.mark.parametrize(
    "option", ["--autotune", "-p", '--mpi-args=--map-by "x"', "--jsrun", "--log-level", "-cb"]
)
def test_what_is_not_taken_is_one_error_that_names_what_to_use(option, capsys):
    assert ringrun.main(["-np", "2", option, "python", "train.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"ringrun: {option.split('=')[0]} is an option of horovodrun that ringrun does not take. "
    )
    assert said.count("\n") == 1


def test_a_command_line_of_horovodrun():
    line = """-np 4 -H a:2,b:2 --network-interface lo --timeline-filename t.json --verbose
        --timeline-mark-cycles --start-timeout 30 python t.py --autotune -p 1"""
    options = parser().parse_args(shlex.split(line))
    assert (options.ranks, options.hosts) == (4, "a:2,b:2")
    assert options.command[2:] == ["--autotune", "-p", "1"]
    assert variables(options, here=False) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "HOROVOD_TIMELINE": str(Path("t.json").absolute()),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_START_TIMEOUT": "30",
    }
    line = "-np 2 --min-np 2 --max-np 4 -hostfile hosts train.py"
    elastic = parser().parse_args(shlex.split(line))
    limits = ringrun._elastic_limits(elastic, 2)
    assert (limits.ranks, limits.min_ranks, limits.max_ranks) == (2, 2, 4)
    assert elastic.hostfile == "hosts"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--network-interfaces lo,wlan77", "this host has "),
        ("--timeline-mark-cycles", "goes with --timeline-filename"),
        ("--start-timeout 0", "must be more than 0"),
        ("--slots-per-host 2", "goes with --discover"),
        ("--discover /absent/hosts.sh", "no such command"),
    ],
)
def test_options_that_cannot_be(line, text, capsys):
    assert ringrun.main(["-np", "2", *line.split(), "--no-mpi", "--dry-run", "true"]) == 2
    assert text in capsys.readouterr().err
    assert socket.if_nameindex()
