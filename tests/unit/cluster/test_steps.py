"""The launcher inside a job: whose node is whose, the srun command, containers, GPUs, and the end of a step."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_layout
from prepared_slurm import PreparedSlurm

from milesbatch.cluster import steps
from milesbatch.cluster.context import JobContext, RoleContext
from milesbatch.cluster.job_plan import JobPlan, plan_jobs
from milesbatch.cluster.steps import StepLauncher, StepProcess, read_allocation, role_command
from milesbatch.errors import SlurmError
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site
from milesbatch.recipe.slurm import Container

ARGUMENTS = ("-m", "milesbatch.trainer")
RUN = Path("/scratch/run")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    made = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(made.path))
    return made


def plan(slurm: dict[str, Any], site: Site) -> JobPlan:
    values = {"name": "tiny", "steps": 4, "model": {"kind": "made"}, "data": {"kind": "arithmetic"}}
    groups = {"trainer": {"ranks": 4, "groups_per_step": 4}, "rollout": {"workers": 6}}
    return plan_jobs(Recipe.model_validate({**values, **groups, "slurm": slurm}), site)


SLURM = {"trainer": {"nodes": 2, "gpus_per_task": 2}, "rollout": {"nodes": 3, "gpus_per_task": 1}}
SITE = Site(name="here", python="/venv/bin/python", srun_options=("--mpi=none",))


def answer_nodes(fake: PreparedSlurm, **lists: str) -> None:
    for short, names in lists.items():
        fake.answer("scontrol", names.replace(",", "\n"), when=f"hostnames {short}")
    for name in ("t1", "t2", "r1", "r2", "r3"):
        fake.answer(
            "scontrol",
            f"NodeName={name} NodeAddr=10.0.{'tr'.index(name[0])}.{name[1]} State=ALLOCATED",
            when=f"node {name}",
        )


def het_launcher(
    fake: PreparedSlurm, site: Site = SITE, slurm: dict[str, Any] | None = None, run: Path = RUN
) -> StepLauncher:
    answer_nodes(fake, T="t1,t2", R="r1,r2,r3")
    job = JobContext("33", 0, "t1", ("T", "R"))
    found = plan(slurm or SLURM, site)
    return StepLauncher(read_allocation(job, found, ("trainer", "rollout")), site, run)


def context(role: str, index: int, run: Path = RUN, attempt: int = 1) -> RoleContext:
    return RoleContext(
        run_directory=run,
        role=role,
        index=index,
        count=4,
        incarnation=1,
        attempt=attempt,
        controller_url="http://10.0.0.1:1",
        token="secret",
        parent_pid=7,
        heartbeat_s=1.0,
    )


# -- whose nodes ------------------------------------------------------------------------------------------------------


def test_ranks_fill_one_node_after_the_other_and_keep_their_node(fake: PreparedSlurm) -> None:
    launcher = het_launcher(fake)
    assert [launcher.node_of(context("trainer", index)) for index in range(4)] == ["t1", "t1", "t2", "t2"]
    assert [launcher.node_of(context("rollout", index)) for index in range(6)] == ["r1", "r1", "r2", "r2", "r3", "r3"]
    assert launcher.node_of(context("trainer", 3, attempt=9)) == "t2"
    assert launcher.node_of(context("tracking", 0)) == "t1"
    assert (launcher.has("trainer"), launcher.has("tracking"), launcher.has("other")) == (True, True, False)
    assert launcher.address == "10.0.0.1"


def test_workers_of_a_joining_job_have_each_their_own_slot(fake: PreparedSlurm) -> None:
    """Their numbers begin with the job's id."""
    answer_nodes(fake, R="r1,r2,r3")
    allocation = read_allocation(JobContext("7", 0, "r1", ("R",)), plan(SLURM, SITE), ("rollout",))
    slots = [allocation.places["rollout"].slot(7000 + place) for place in range(6)]
    assert len({(node.name, local) for node, local in slots}) == 6
    assert allocation.places["rollout"].het_group is None


def test_one_allocation_is_split_by_node(fake: PreparedSlurm) -> None:
    answer_nodes(fake, A="t1,t2,r1,r2,r3")
    found = plan({"shape": "single", **SLURM}, SITE)
    allocation = read_allocation(JobContext("7", 0, "t1", ("A",)), found, ("trainer", "rollout"))
    names = {role: [node.name for node in place.nodes] for role, place in allocation.places.items()}
    assert names == {"trainer": ["t1", "t2"], "rollout": ["r1", "r2", "r3"]}


def test_nodes_that_the_plan_does_not_ask_for_are_an_error(fake: PreparedSlurm) -> None:
    answer_nodes(fake, T="t1,t2", R="r1,r2")
    with pytest.raises(SlurmError, match="job 33 has nodes r1, r2 for rollout, but the plan asks for 3"):
        read_allocation(JobContext("33", 0, "t1", ("T", "R")), plan(SLURM, SITE), ("trainer", "rollout"))


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_nodes_of_a_development_cluster_meet_on_the_loopback(fake: PreparedSlurm, address: str) -> None:
    fake.answer("scontrol", f"NodeName=t1 NodeAddr={address} State=IDLE", when="node")
    fake.answer("scontrol", "t1\nt2", when="hostnames")
    allocation = read_allocation(JobContext("33", 0, "t1", ("T",)), plan(SLURM, SITE), ("trainer",))
    assert allocation.address == "127.0.0.1"


def test_a_node_that_slurm_calls_down_is_lost_and_no_answer_is_not(fake: PreparedSlurm) -> None:
    launcher = het_launcher(fake)
    assert not launcher.is_lost(context("rollout", 0))
    fake.answer("scontrol", "NodeName=r1 NodeAddr=x State=DOWN*", when="node r1")
    assert launcher.is_lost(context("rollout", 1))
    fake.answer("scontrol", err="Unable to contact slurm controller", status=1)
    assert not launcher.is_lost(context("rollout", 1))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_srun_command(fake: PreparedSlurm) -> None:
    assert het_launcher(fake).python_step() == [
        "srun",
        "--het-group=0",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=t1",
        "--overlap",
        "--cpu-bind=none",
        "--mem=0",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--export=ALL",
        "--job-name=preparation",
        "--mpi=none",
        "/venv/bin/python",
    ]


def test_without_components_no_group_is_named(fake: PreparedSlurm) -> None:
    answer_nodes(fake, T="t1,t2")
    launcher = StepLauncher(
        read_allocation(JobContext("7", 0, "t1", ("T",)), plan(SLURM, SITE), ("trainer",)), SITE, RUN
    )
    assert not any(word.startswith("--het-group") for word in launcher.python_step())


@pytest.mark.parametrize(
    ("container", "command"),
    [
        (None, ["/venv/bin/python", *ARGUMENTS]),
        (
            {"runtime": "apptainer", "image": "a b.sif", "mounts": ["/data:/data:ro"], "options": ["--nv"]},
            [
                *("apptainer", "exec", "--bind", "/scratch/run:/scratch/run", "--bind", "/data:/data:ro"),
                *("--nv", "a b.sif", "python3", *ARGUMENTS),
            ],
        ),
        (
            {"runtime": "singularity", "image": "x.sif", "python": "/opt/conda/bin/python"},
            [
                "singularity",
                "exec",
                "--bind",
                "/scratch/run:/scratch/run",
                "x.sif",
                "/opt/conda/bin/python",
                *ARGUMENTS,
            ],
        ),
        (
            {
                "runtime": "pyxis",
                "image": "nvcr.io#nvidia/pytorch:24.06-py3",
                "mounts": ["/data:/data"],
                "options": ["--no-x"],
            },
            [
                "--container-image=nvcr.io#nvidia/pytorch:24.06-py3",
                "--container-mounts=/scratch/run:/scratch/run,/data:/data",
                *("--no-x", "python3", *ARGUMENTS),
            ],
        ),
    ],
    ids=["none", "apptainer", "singularity", "pyxis"],
)
def test_what_runs_in_a_step(container: dict[str, Any] | None, command: list[str]) -> None:
    made = None if container is None else Container.model_validate(container)
    assert role_command(made, "/venv/bin/python", RUN, ARGUMENTS) == command


def test_each_role_runs_in_its_own_container(fake: PreparedSlurm, tmp_path: Path) -> None:
    run = make_layout(tmp_path / "run").root
    site = Site.model_validate(
        {"name": "here", "python": "py", "container": {"runtime": "apptainer", "image": "all.sif"}}
        | {"rollout": {"container": {"runtime": "pyxis", "image": "rollout.sqsh"}}}
    )
    launcher = het_launcher(fake, site, run=run)
    for role in ("trainer", "rollout"):
        launcher.start(context(role, 0, run), 1).kill()
    trainer, rollout = fake.said_to("srun")
    assert "all.sif" in trainer and "python3" in trainer
    assert "--container-image=rollout.sqsh" in rollout and "all.sif" not in rollout


# -- GPUs and environment ---------------------------------------------------------------------------------------------


def start(fake: PreparedSlurm, run: Path, role: str, index: int, slurm: dict[str, Any] | None = None) -> dict[str, str]:
    """Environment that a started step sees."""
    (fake.path / "srun").write_text("#!/bin/sh\nexec /usr/bin/env\n")
    process = het_launcher(fake, slurm=slurm, run=run).start(context(role, index, run), 3)
    assert isinstance(process, StepProcess)
    assert process.process.wait(10) == 0
    lines = (run / "logs" / f"{role}-{index}.i000001.log").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.parametrize(
    ("role", "index", "devices", "address"),
    [
        ("trainer", 0, "0:2", "10.0.0.1"),
        ("trainer", 1, "2:2", "10.0.0.1"),
        ("trainer", 2, "0:2", "10.0.0.2"),
        ("rollout", 5, "1:1", "10.0.1.3"),
    ],
)
def test_a_process_is_told_its_gpus_and_its_nodes_address(
    fake: PreparedSlurm, tmp_path: Path, role: str, index: int, devices: str, address: str
) -> None:
    seen = start(fake, make_layout(tmp_path / "run").root, role, index)
    assert seen["MILESBATCH_ROLE_DEVICE_SLICE"] == devices
    assert seen["MILESBATCH_ROLE_ADDRESS"] == address
    assert seen["MILESBATCH_ROLE_PARENT_PID"] == "0", "Slurm ends it, not the death of a parent on another node"
    assert seen["OMP_NUM_THREADS"] == "3"


def test_a_process_without_gpus_is_told_to_use_none(fake: PreparedSlurm, tmp_path: Path) -> None:
    """In one allocation it may share a node's size with a group that has GPUs."""
    slurm = {**SLURM, "trainer": {"nodes": 2}}
    seen = start(fake, make_layout(tmp_path / "run").root, "trainer", 1, slurm)
    assert seen["MILESBATCH_ROLE_DEVICE_SLICE"] == "0:0"


def test_a_role_that_no_node_is_for_runs_beside_the_controller(fake: PreparedSlurm, tmp_path: Path) -> None:
    run = make_layout(tmp_path / "run").root
    process = het_launcher(fake, run=run).start(replace(context("tracking", 0, run), parent_pid=0), 1)
    process.kill()
    assert fake.said_to("srun") == []


# -- the end of a step ------------------------------------------------------------------------------------------------


def step(command: list[str]) -> StepProcess:
    return StepProcess("33", "rollout-0.1", subprocess.Popen(command))


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (75, 75), (128, 128), (137, -9), (143, -15)])
def test_a_signal_that_ended_the_task_is_told_as_everywhere(status: int, code: int) -> None:
    ended = step([sys.executable, "-c", f"import sys; sys.exit({status})"])
    ended.process.wait()
    assert ended.exit_code() == code


def test_a_running_step_has_no_exit_code_and_can_be_asked_to_end() -> None:
    running = step([sys.executable, "-c", "import time; time.sleep(60)"])
    assert running.exit_code() is None and running.pid == running.process.pid
    running.terminate()
    assert running.process.wait(10) == -15
    running.terminate()


def test_a_kill_that_slurm_confirms_is_proven(fake: PreparedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    running = step([sys.executable, "-c", "import time; time.sleep(60)"])
    fake.answer("scontrol", "JobId=33 JobState=RUNNING")
    fake.answer("squeue", "33.1 rollout-0.1\n")
    (fake.path / "scancel").write_text(f"#!/bin/sh\nkill -9 {running.pid}\n")
    assert running.kill()
    assert running.exit_code() == -9


@pytest.mark.parametrize("how", ["no answer", "no end"])
def test_a_kill_without_proof_is_not_called_one(fake: PreparedSlurm, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(steps, "_KILL_S", 0.3)
    running = step([sys.executable, "-c", "import time; time.sleep(60)"])
    fake.answer("scontrol", "JobId=33 JobState=RUNNING")
    if how == "no answer":
        fake.answer("scontrol", err="Unable to contact slurm controller", status=1)
    began = time.monotonic()
    assert not running.kill()
    assert running.process.poll() is not None, "srun itself is gone in any case"
    assert time.monotonic() - began < 10
