"""Ranks that come late: what is reported, by whom, how often, and how the job ends.
`stall_script.py` is the rank.
"""

import re

import pytest

from tests.processes import ROOT, assert_gone, mpirun, mpirun_path

SCRIPT = ROOT / "tests" / "job" / "stall_script.py"
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python"),
]
REPORT = r"^(\S.*) has waited (\d+) s; it fails after 60 s\.\n((?:  .*\n)*)"
NAP = (
    r"    \S*stall_script\.py:\d+ nap: time\.sleep\(seconds\)  # the line that a report must show\n"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Exit code, the output of each phase, and where the ranks wrote."""
    folder = tmp_path_factory.mktemp("stall")
    result = mpirun(3, str(SCRIPT), str(folder))
    parts = re.split(r"^phase (.*)\n", result.stdout, flags=re.MULTILINE)
    return result.returncode, dict(zip(parts[1::2], parts[2::2], strict=True)), folder


def reports(output):
    return re.findall(REPORT, output, flags=re.MULTILINE)


def test_a_wait_shorter_than_the_warning_is_not_reported(job):
    _, phases, _ = job
    assert phases["slow"] == ""


def test_rank_0_names_the_late_rank_with_its_stack_once_a_report_and_ever_more_rarely(job):
    _, phases, _ = job
    found = reports(phases["asleep"])
    # due after 1, 3 and 7 s, in a wait of 5 s
    first, second = (int(seconds) for _, seconds, _ in found)
    assert 1 <= first < 3 <= second < 7, phases["asleep"]
    for collective, _, body in found:
        assert collective.startswith('all_reduce "asleep" (sum, float32, 1000 elements)')
        away = (
            r"  rank 1 \(host \S+, pid \d+\) is not in it, in phase asleep; the last that it "
            r"finished was "
        )
        away += r'all_reduce "before asleep" \(.*\)\. The main thread, innermost call first:\n'
        assert re.match(away + "  " + NAP, body), body
        assert body.endswith("  ranks 0, 2 wait in it, in phase asleep.\n"), body


def test_a_stopped_rank_is_silent_and_training_goes_on_when_it_does(job):
    _, phases, folder = job
    found = reports(phases["stopped"])
    assert found
    pid = (folder / "pid.2").read_text()
    for _, _, body in found:
        assert re.match(
            rf"  rank 2 \(host \S+, pid {pid}\) is silent: it is stopped .*--pid {pid}\b", body
        ), body
        assert body.endswith("  ranks 0, 1 wait in it, in phase stopped.\n")


def test_rank_0_reports_its_own_lateness(job):
    _, phases, _ = job
    found = reports(phases["rank 0 asleep"])
    assert found
    for _, _, body in found:
        assert re.match(r"  rank 0 \(host \S+, pid \d+\) is not in it, ", body), body
        assert re.search(NAP, body)
        assert body.endswith("  ranks 1, 2 wait in it, in phase rank 0 asleep.\n")


def test_without_rank_0_each_that_waits_reports_itself(job):
    _, phases, folder = job
    silent = (
        rf"  rank 0 \(host \S+, pid {(folder / 'pid.0').read_text()}\) is silent: it is stopped"
    )
    # Where cores are busy rank 0 goes on before the others are done, and then asks them all.
    found = [body for *_, body in reports(phases["rank 0 stopped"]) if re.match(silent, body)]
    assert len(found) >= 2
    assert all("Without rank 0 the other ranks cannot be asked" in body for body in found)
    waiting = set(
        re.findall(r"  (rank \d waits in it, in phase rank 0 stopped)", phases["rank 0 stopped"])
    )
    assert waiting == {f"rank {rank} waits in it, in phase rank 0 stopped" for rank in (1, 2)}


def test_what_rank_0_hears_when_it_goes_on_is_no_report_of_a_later_collective(job):
    _, phases, _ = job
    # before rank 0's main thread has joined the collective that waited, its report is still true
    assert all(
        '"rank 0 stopped"' in head for head in re.findall(r"(.*) has waited", phases["after"])
    )


def test_past_the_timeout_every_rank_raises_the_report_and_the_job_ends(job):
    code, phases, folder = job
    assert code != 0
    errors = [(folder / f"error.{rank}").read_text() for rank in range(3)]
    assert errors[0] == errors[1] == errors[2]
    assert re.match(
        r'all_reduce "timeout" \(.*\) did not finish within 2 s: still waiting for rank 1\.\n',
        errors[0],
    )
    assert re.search(
        r"\n  rank 1 \(host \S+, pid \d+\) is not in it, in phase timeout; ", errors[0]
    )
    assert re.search(NAP, errors[0])
    assert errors[0].endswith(
        "\n  ranks 0, 2 wait in it, in phase timeout.\nIf a rank is only slow, give a longer "
        "timeout."
    )
    assert "CollectiveError" in phases["timeout"]
    assert_gone([int((folder / f"pid.{rank}").read_text()) for rank in range(3)])
