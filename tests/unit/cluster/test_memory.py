"""Out of memory or not: the kernel's count, and Slurm's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from milesbatch.cluster.memory import MemoryKills, slurm_says_out_of_memory


def test_the_count_is_compared_with_the_last_time(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 3\n")
    kills = MemoryKills(vmstat)
    assert not kills.have_grown()
    vmstat.write_text("nr_free_pages 1\noom_kill 4\n")
    assert kills.have_grown()
    assert not kills.have_grown()
    vmstat.unlink()
    assert not kills.have_grown()


def test_this_kernel_counts() -> None:
    assert not MemoryKills().have_grown()
    assert "oom_kill " in Path("/proc/vmstat").read_text()


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
            True,
        ),
        ("x\nsrun: error: n1: task 0: Out Of Memory\n", True),
        ("slurmstepd-n1: error: Detected 2 oom-kill event(s) in StepId=7.1 cgroup.", True),
        ("srun: error: n1: task 0: Killed", False),
        ("user code: out of memory", False),
        ("", False),
    ],
)
def test_what_slurm_writes(log: str, says: bool) -> None:
    assert slurm_says_out_of_memory(log) is says
