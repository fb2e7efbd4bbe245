"""A run on a real Slurm, undisturbed and through the ends of its jobs: same digests and fates as an unbroken local run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import wait_until
from slurm_run import HET_AND_MORE, SHAPES, STEPS, SlurmRun

from milesbatch.recipe.shipped import shipped_sites

NewRun = Callable[[], SlurmRun]


@pytest.mark.parametrize("shape", HET_AND_MORE)
def test_submit_to_the_end(new_run: NewRun, unbroken: object, shape: str) -> None:
    run = new_run()
    run.submit(f"slurm.shape={shape}")
    queued = json.loads(run.milesbatch("status", run.directory, "--json").out)
    assert queued["state"] in ("queued", "running")
    second = run.milesbatch("submit", "quick", "--site", "devcluster", "--run-dir", run.directory)
    assert second.code != 0
    run.finish(unbroken)
    assert len(run.incarnations()) == 1
    assert json.loads(run.milesbatch("status", run.directory, "--json").out)["state"] == "finished"


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_requeued_by_hand(new_run: NewRun, unbroken: object, shape: str) -> None:
    run = new_run()
    run.submit(f"slurm.shape={shape}")
    run.wait_steps(6)
    leader = run.job_ids()[0]
    run.cluster.run(["scontrol", "requeue", str(leader)])
    run.finish(unbroken)
    assert [record["job_id"] for record in run.incarnations()] == [str(leader)] * 2
    assert [record["restart_count"] for record in run.incarnations()] == [0, 1]


@pytest.mark.long
def test_time_limits_are_passed_by_a_chain_of_starts(new_run: NewRun, unbroken: object) -> None:
    """Each start saves before Slurm ends it, so that nothing is replayed."""
    run = new_run()
    run.submit("slurm.time_limit_minutes=1", f"steps={STEPS * 10}", "checkpoint.every=50")
    run.wait(lambda: len(run.incarnations()) >= 3, "two continuations", 400.0)
    run.wait_new_steps()
    ended = run.milesbatch("cancel", run.directory)
    assert ended.code == 0, ended.err
    audit = json.loads(run.milesbatch("audit", run.directory, "--json").out)
    assert audit["ok"]
    assert audit["work_repeated"]["steps_replayed"] == 0, audit
    run.check_no_process_is_left()


@pytest.mark.long
def test_a_save_that_takes_too_long_gives_way_to_the_requeue(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is stuck when the limit comes near: the job must be queued again before Slurm ends it for good."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "faults: [{name: slow, role: trainer-0, point: trainer.recorded, nth: 30, action: delay, seconds: 100}]"
    )
    monkeypatch.setenv("MILESBATCH_FAULTS", str(plan))
    run = new_run()
    run.submit("slurm.time_limit_minutes=1", f"steps={STEPS * 10}")
    (job_id,) = run.job_ids()
    run.wait(lambda: len(run.incarnations()) >= 2, "a continuation", 300.0)
    run.wait_new_steps()
    assert [(record["job_id"], record["restart_count"]) for record in run.incarnations()[:2]] == [
        (str(job_id), 0),
        (str(job_id), 1),
    ]
    assert "Slurm ends the job in" in run.incarnations()[1]["cause"]
    ended = run.milesbatch("cancel", run.directory)
    assert ended.code == 0, ended.err
    assert json.loads(run.milesbatch("audit", run.directory, "--json").out)["ok"]
    run.check_no_process_is_left()


SLOW_SITE = """extends: {devcluster}
setup: ['touch {begun}', 'sleep 8']
"""


@pytest.mark.long
def test_a_warning_while_the_script_sets_up_ends_nothing(new_run: NewRun, unbroken: object, tmp_path: Path) -> None:
    """Modules load for seconds on real sites, and Slurm's warning kills a process that does not expect it."""
    run = new_run()
    site = tmp_path / "slow.yaml"
    begun = tmp_path / "begun"  # a job that Slurm calls running may not have reached its script's first line
    site.write_text(SLOW_SITE.format(devcluster=shipped_sites() / "devcluster.yaml", begun=begun))
    run.submit(site=site)
    (job_id,) = run.job_ids()
    job = str(job_id)
    wait_until(begun.exists, "the job's script runs", 60.0)
    run.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    wait_until(lambda: (run.directory / "run.json").exists() or run.log(), "the controller speaks", 120.0)
    run.cluster.run(["scancel", "--batch", "--signal=USR1", job])  # while the model is made
    run.finish(unbroken)
    assert [record["restart_count"] for record in run.incarnations()] == [0]


BLIND_SQUEUE = """#!/bin/sh
case "$*" in *%L*) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1;; esac
exec {squeue} "$@"
"""


@pytest.mark.long
def test_a_time_limit_that_nobody_saw_coming_is_passed_too(new_run: NewRun, tmp_path: Path) -> None:
    """Slurm never says how much time is left: the job is over when the controller learns of it, and another one goes on."""
    run = new_run()
    blind = tmp_path / "bin" / "squeue"
    blind.parent.mkdir()
    squeue = shutil.which("squeue", path=run.cluster.env["PATH"])
    blind.write_text(BLIND_SQUEUE.format(squeue=squeue))
    blind.chmod(0o755)
    site = tmp_path / "site.yaml"
    site.write_text(f"extends: {shipped_sites() / 'devcluster.yaml'}\nsetup: ['export PATH={blind.parent}:$PATH']\n")
    run.submit("slurm.time_limit_minutes=1", f"steps={STEPS * 10}", site=site)
    first = run.job_ids()
    run.wait(lambda: len(run.incarnations()) >= 2, "a continuation", 300.0)
    run.wait_new_steps()
    assert run.incarnations()[-1]["job_id"] != str(first[0])
    ended = run.milesbatch("cancel", run.directory)
    assert ended.code == 0, ended.err
    assert json.loads(run.milesbatch("audit", run.directory, "--json").out)["ok"]
    run.check_no_process_is_left()


@pytest.mark.parametrize("now", [pytest.param(True, marks=pytest.mark.long), False], ids=["now", "clean"])
def test_cancel_ends_everything_and_resume_goes_on(new_run: NewRun, unbroken: object, now: bool) -> None:
    run = new_run()
    run.submit("slurm.shape=separate")
    run.wait_steps(6)
    ended = run.milesbatch("cancel", run.directory, *(["--now"] if now else []))
    assert ended.code == 0, ended.err
    wait_until(lambda: not run.job_ids(), "no job is left", 30.0)
    run.check_no_process_is_left()
    assert json.loads(run.milesbatch("status", run.directory, "--json").out)["state"] == "stopped"
    resumed = run.milesbatch("resume", run.directory)
    assert resumed.code == 0, resumed.err
    run.finish(unbroken)


def test_scancel_of_a_person_is_not_undone(new_run: NewRun) -> None:
    run = new_run()
    run.submit()
    run.wait_steps(4)
    run.cluster.run(["scancel", str(run.job_ids()[0])])
    wait_until(lambda: not run.job_ids(), "no job is left", 60.0)
    run.check_no_process_is_left()
    assert len(run.incarnations()) == 1


def test_wrong_input_ends_the_job_at_once_and_for_good(new_run: NewRun) -> None:
    """Found only on the compute node: the job says what is wrong, gives its nodes back, and is not queued again."""
    run = new_run()
    run.submit("environment.reward=no_such_module:reward")
    wait_until(lambda: not run.job_ids(), "the job ends", 90.0)
    assert "no_such_module" in run.log()
    assert not run.incarnations()


@pytest.mark.long
def test_a_run_that_makes_no_progress_stops(new_run: NewRun) -> None:
    """Workers die before the first step: the run stops after its tries, gives its nodes back, and says why."""
    run = new_run()
    run.submit("slurm.max_restarts_without_progress=1")
    run.strike("rollout-0")
    run.strike("rollout-1")
    run.wait(lambda: not run.job_ids(), "the job ends", 120.0)
    assert "without a new train step" in run.log()
    run.check_no_process_is_left()
