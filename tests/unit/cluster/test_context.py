"""What a process is told by its environment: its GPUs, its job, and paths with variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milesbatch.cluster.context import expand_path, job_context, narrow_devices, site_directories, site_name
from milesbatch.errors import InputError

# -- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("device_slice", "visible", "left"),
    [
        ("0:1", "0,1,2,3", "0"),
        ("2:2", "0,1,2,3", "2,3"),
        ("1:1", "4,5", "5"),
        ("1:1", "GPU-aa,GPU-bb", "GPU-bb"),
        ("0:0", "0,1", ""),
        ("", "0,1", "0,1"),
    ],
)
def test_a_process_is_left_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, device_slice: str, visible: str, left: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    narrow_devices(device_slice)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert "ROCR_VISIBLE_DEVICES" not in os.environ


def test_amd_gpus_are_narrowed_by_their_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1,2,3")
    narrow_devices("2:1")
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("device_slice", "left"), [("0:2", "0,1"), ("2:2", "2,3"), ("0:0", "")])
def test_where_slurm_names_no_gpus_they_are_numbered(device_slice: str, left: str) -> None:
    narrow_devices(device_slice)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_without_a_slice_nothing_is_set() -> None:
    narrow_devices("")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_fewer_gpus_than_were_asked_for_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InputError, match="is to use GPUs 2 to 3 of its node, but CUDA_VISIBLE_DEVICES is 0,1"):
        narrow_devices("2:2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


# -- the job ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "33")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    return monkeypatch


def test_outside_of_a_job_there_is_none(in_job: pytest.MonkeyPatch) -> None:
    in_job.delenv("SLURM_JOB_ID")
    assert job_context() is None


def test_a_plain_job_on_its_first_start(in_job: pytest.MonkeyPatch) -> None:
    found = job_context()
    assert found is not None
    assert (found.job_id, found.restart_count, found.node, found.node_lists, found.is_het) == (
        "33",
        0,
        "",
        ("n1",),
        False,
    )


def test_a_heterogeneous_job_on_its_second_start(in_job: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
        "SLURM_RESTART_COUNT": "1",
        "SLURMD_NODENAME": "n1",
    }.items():
        in_job.setenv(name, value)
    found = job_context()
    assert found is not None
    assert (found.restart_count, found.node, found.node_lists, found.is_het) == (1, "n1", ("n1", "n[2-3]"), True)


# -- paths and sites --------------------------------------------------------------------------------------------------


def test_paths_with_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert expand_path("~/runs") == Path("/home/me/runs")
    assert expand_path("$SCRATCH/runs") == expand_path("${SCRATCH}/runs") == Path("/scratch/me/runs")
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(InputError, match=r"a variable in the path \$SCRATCH/runs is not set"):
        expand_path("$SCRATCH/runs")


def test_where_sites_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/conf")
    assert site_directories()[0] == Path("/conf/milesbatch/sites")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert site_directories()[0] == Path("/home/me/.config/milesbatch/sites")
    monkeypatch.setenv("MILESBATCH_SITE", "")
    assert site_name() is None
