"""Things that break on a real Slurm, in the middle of a run: it ends as the unbroken one did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from command import events, wait_until
from own_clusters import SETTINGS
from slurm_run import HET_AND_MORE, SHAPES, SlurmRun, is_worker

NewRun = Callable[[], SlurmRun]


@pytest.mark.parametrize("shape", HET_AND_MORE)
def test_killed_processes_are_replaced_inside_the_job(new_run: NewRun, unbroken: object, shape: str) -> None:
    run = new_run()
    run.submit(f"slurm.shape={shape}")
    run.wait_steps(4)
    run.strike(is_worker)
    run.wait_new_steps()
    run.strike("trainer-1")
    run.wait_new_steps()
    run.finish(unbroken)
    assert len(run.incarnations()) == 1, run.log()


@pytest.mark.long
def test_a_stopped_worker_is_replaced_and_its_revival_changes_nothing(new_run: NewRun, unbroken: object) -> None:
    """SIGSTOP, a replacement, SIGCONT: the zombie is refused and ends."""
    run = new_run()
    run.submit()
    run.wait_steps(3)
    zombie = run.strike("rollout-0", signal.SIGSTOP)
    wait_until(
        lambda: any(e["name"] == "rollout-0" for e in events(run.directory, "controller-0", "process_ended")), "noticed"
    )
    run.wait_new_steps()
    with contextlib.suppress(ProcessLookupError):  # Slurm may have ended it already
        os.kill(zombie, signal.SIGCONT)
    run.finish(unbroken)
    assert len(run.incarnations()) == 1, run.log()


@pytest.mark.long
def test_a_dead_controller_leads_to_a_new_start(new_run: NewRun, unbroken: object) -> None:
    run = new_run()
    run.submit()
    run.wait_steps(6)
    leader = run.job_ids()[0]
    run.strike("controller")
    run.finish(unbroken)
    assert [record["job_id"] for record in run.incarnations()] == [str(leader)] * 2


@pytest.mark.long
@pytest.mark.parametrize("role", ["trainer", "rollout"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_lost_node(new_run: NewRun, unbroken: object, shape: str, role: str) -> None:
    run = new_run()
    run.submit(f"slurm.shape={shape}", "slurm.trainer.exclusive=true")  # two jobs would share a node here
    run.wait_steps(5)
    node = run.node_of(role)
    assert node != run.node_of("trainer" if role == "rollout" else "rollout")
    before = len(run.incarnations())
    run.cluster.kill_node(node)
    run.finish(unbroken)
    if shape == "separate" and role == "rollout":
        assert len(run.incarnations()) == before, "the trainer goes on while rollout is replaced"


@pytest.mark.long
def test_a_lost_node_that_slurm_notices_late(slow_run: SlurmRun, unbroken: object) -> None:
    """The fast path: heartbeats end long before Slurm gives the node up; another job goes on without it."""
    run = slow_run
    run.submit()
    run.wait_steps(5)
    first, node = run.job_ids()[0], run.node_of("rollout")
    run.cluster.kill_node(node)
    run.finish(unbroken)
    assert run.incarnations()[0]["job_id"] == str(first)
    assert run.incarnations()[-1]["job_id"] != str(first)
    assert node in run.incarnations()[-1]["cause"]


@pytest.mark.long
@pytest.mark.parametrize("notice", [True, False], ids=["told", "not-told"])
def test_preemption(new_run: NewRun, unbroken: object, notice: bool) -> None:
    """The rollout nodes are wanted by others: in one heterogeneous job that takes the whole job."""
    run = new_run(replace(SETTINGS, send_user_signal=notice))
    run.submit("slurm.trainer.partition=rollout")
    run.wait_steps(5)
    run.cluster.run(["sbatch", "-p", "high", "-N", "8", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5"])
    run.finish(unbroken)
    assert len(run.incarnations()) >= 2


def test_preempted_rollout_jobs_come_back_while_the_trainer_goes_on(new_run: NewRun, unbroken: object) -> None:
    run = new_run()
    run.submit("slurm.shape=separate")
    run.wait_steps(5)
    run.cluster.run(
        ["sbatch", "-p", "high", "-N", "7", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 4"]
    )  # the trainer's node cannot be preempted
    run.finish(unbroken)
    assert len(run.incarnations()) == 1


@pytest.mark.long
def test_slurmctld_restarts(new_run: NewRun, unbroken: object) -> None:
    run = new_run()
    run.submit()
    run.wait_steps(4)
    run.cluster.kill_controller()
    run.wait_new_steps(2)
    run.cluster.start_controller()
    run.finish(unbroken)
    assert len(run.incarnations()) == 1, run.log()


@pytest.mark.long
def test_workers_join_and_leave(new_run: NewRun) -> None:
    run = new_run()
    run.submit("steps=2000")
    run.wait_steps(3)
    more = run.milesbatch("scale", run.directory, "--rollout", "4")
    assert more.code == 0, more.err
    made = lambda: {int(path.name.split(".")[2].split("-")[1]) for path in run.directory.glob("trajectories/*.arrow")}  # noqa: E731
    run.wait(lambda: max(made(), default=0) >= 1000, "a worker that joined has made trajectories", 240.0)
    fewer = run.milesbatch("scale", run.directory, "--rollout", "2")
    assert fewer.code == 0, fewer.err
    wait_until(
        lambda: not any(int(name.split("-")[1]) >= 1000 for name in filter(is_worker, run.processes().values())), "gone"
    )
    run.wait_new_steps(3)
    assert run.milesbatch("cancel", run.directory).code == 0
    assert json.loads(run.milesbatch("audit", run.directory, "--json").out)["ok"]
    assert len(run.incarnations()) == 1
    assert not run.job_ids()
    run.check_no_process_is_left()


@pytest.mark.long
def test_a_controller_that_stands_still_for_a_while_gets_its_workers_back(new_run: NewRun, unbroken: object) -> None:
    """Its rollout job takes it for gone, leaves, and must join the same incarnation again."""
    run = new_run()
    run.submit("slurm.shape=separate")
    run.wait_steps(6)
    (leader,) = (job_id for job_id in run.job_ids() if (run.directory / "logs" / f"slurm-run-{job_id}.log").exists())
    run.cluster.run(["scontrol", "suspend", str(leader)])
    run.wait(lambda: "left incarnation 1" in run.log(), "the rollout job leaves", 120.0)
    run.cluster.run(["scontrol", "resume", str(leader)])
    run.finish(unbroken)
    assert len(run.incarnations()) == 1
    assert run.log().count("workers join incarnation 1") == 2
