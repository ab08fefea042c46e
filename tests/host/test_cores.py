"""Cores that a process may use: affinity and processor quotas of control groups."""

import math

from lightning_ring.host import cores
from lightning_ring.host.cores import available_cores, cgroup_quota


def test_cores_follow_the_quota_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    unlimited = available_cores()
    assert unlimited >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores() == unlimited
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert available_cores() == 1
    assert available_cores(64) == 1


def test_quotas_of_all_groups_over_a_process_count(tmp_path, monkeypatch):
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    monkeypatch.setattr(cores, "_CGROUP", root)
    monkeypatch.setattr(cores, "_OWN", own)
    job = root / "system.slice" / "job_7"
    job.mkdir(parents=True)
    own.write_text("0::/system.slice/job_7/step\n")
    assert cgroup_quota() == math.inf
    (job / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota() == 1.5, "the job's, above this step"
    (job.parent / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota() == 1.5
    own.write_text("4:cpu,cpuacct:/box\n0::/other\n")
    assert cgroup_quota() == math.inf
    (root / "cpu" / "box").mkdir(parents=True)
    (root / "cpu" / "box" / "cpu.cfs_quota_us").write_text("50000\n")
    (root / "cpu" / "box" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota() == 0.5, "version 1"
