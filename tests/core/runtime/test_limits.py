"""Limits of the container: cores by affinity and quota, memory by the control group's limit."""

import os
from pathlib import Path

import pytest

from bothways.core.runtime import process


@pytest.fixture
def groups(tmp_path, monkeypatch) -> Path:
    """The control groups of version 2, with this process in /job:1/step."""
    (tmp_path / "own").write_text("0::/job:1/step\n")
    (tmp_path / "fs" / "job:1" / "step").mkdir(parents=True)
    monkeypatch.setattr(process, "GROUPS", tmp_path / "fs")
    monkeypatch.setattr(process, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path / "fs"


def test_cores_are_those_of_the_affinity_and_of_the_tightest_quota(groups):
    assert process.usable_cores() == 8
    (groups / "job:1" / "cpu.max").write_text("max 100000\n")
    assert process.usable_cores() == 8
    (groups / "job:1" / "cpu.max").write_text("250000 100000\n")
    assert process.usable_cores() == 3
    (groups / "job:1" / "step" / "cpu.max").write_text("50000 100000\n")
    assert process.usable_cores() == 1


def test_quotas_of_version_1(groups):
    (groups.parent / "own").write_text("5:memory:/\n4:cpu,cpuacct:/docker/1\n")
    (groups / "cpu,cpuacct").mkdir()
    (groups / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    (groups / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000\n")
    assert process.usable_cores() == 8
    (groups / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("200000\n")
    assert process.usable_cores() == 2
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("1000\n")
    assert not [*process.group_memory()]
    (groups / "memory" / "memory.limit_in_bytes").write_text("3000\n")
    assert [*process.group_memory()] == [2000]


def test_threads_follow_a_quota_and_a_setting_of_the_user_stays(groups, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process.limit_threads()
    assert "OMP_NUM_THREADS" not in os.environ
    (groups / "cpu.max").write_text("200000 100000\n")
    process.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    process.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_memory_is_what_the_groups_leave_with_the_cache(groups):
    assert not [*process.group_memory()]
    step = groups / "job:1" / "step"
    (step / "memory.max").write_text("max\n")
    (step / "memory.current").write_text("1000\n")
    assert not [*process.group_memory()]
    (step / "memory.max").write_text("3000\n")
    assert [*process.group_memory()] == [2000]
    (step / "memory.stat").write_text("anon 700\ninactive_file 100\nactive_file 50\n")
    assert [*process.group_memory()] == [2150]
