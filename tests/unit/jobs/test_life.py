"""Cancel, resume and scale, against prepared answers of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_layout, make_recipe, make_run, past_incarnation
from prepared_slurm import PreparedSlurm

from milesbatch.controller.stopping import CancelWatch
from milesbatch.errors import EXIT_USAGE, RunMismatchError, SlurmError
from milesbatch.jobs import life
from milesbatch.jobs.marks import mark
from milesbatch.jobs.order import place_order, write_order
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout
from milesbatch.store.takeover import Claimant, take_over

SITE = Site(name="here", python="/venv/bin/python")
PER_JOB = 2


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def submitted(layout: RunLayout, shape: str = "het") -> RunLayout:
    recipe = make_recipe(slurm={"shape": shape}, rollout={"workers": PER_JOB})
    write_order(place_order(layout, recipe, SITE, Path("/home/me")))
    return layout


def queued(fake: PreparedSlurm, layout: RunLayout, *jobs: tuple[str, str, str]) -> None:
    """Job id, state and role of what squeue shows."""
    fake.answer(
        "squeue", "".join(f"{name}|{state}|None|n1|{mark(layout, role)}\n" for name, state, role in jobs), when="--me"
    )


# -- cancel -----------------------------------------------------------------------------------------------------------


def cancel(layout: RunLayout, *, now: bool = False, wait_s: float = 0.2) -> tuple[life.Cancelled, list[str]]:
    said: list[str] = []
    return life.cancel(layout, said.append, now=now, wait_s=wait_s), said


def test_cancelling_ends_rollout_jobs_first_and_then_the_runs(fake: PreparedSlurm, layout: RunLayout) -> None:
    queued(fake, submitted(layout), ("7", "RUNNING", "run"), ("8", "PENDING", "rollout"))
    done, said = cancel(layout)
    assert (done.jobs, done.was_alive, said) == (("8", "7"), False, [])
    assert fake.said_to("scancel") == [("8",), ("7",)]


def test_a_first_job_that_still_waits_can_be_cancelled(fake: PreparedSlurm, tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "queued")
    queued(fake, submitted(layout), ("7", "PENDING", "run"))
    assert cancel(layout)[0].jobs == ("7",)


def test_a_living_controller_is_asked_before_its_job_is_taken_away(fake: PreparedSlurm, layout: RunLayout) -> None:
    queued(fake, submitted(layout), ("7", "RUNNING", "run"))
    number = take_over(layout, Claimant("7"), {}).number  # this process is the controller
    watch = CancelWatch(layout, number)
    assert watch.look_for_stop() is None
    done, said = cancel(layout)
    stop = watch.look_for_stop()
    assert stop is not None and not stop.at_once
    assert (done.was_alive, done.ended_in_time, done.jobs) == (True, False, ("7",))
    assert "asked to stop after the current step" in said[0] and "not stopped within" in said[1]


def test_a_controller_that_stops_in_time_is_waited_for(fake: PreparedSlurm, layout: RunLayout) -> None:
    queued(fake, submitted(layout))
    number = take_over(layout, Claimant("7"), {}).number
    done, said = cancel(layout, now=True, wait_s=30.0)
    assert (done.was_alive, done.ended_in_time, done.jobs) == (True, True, ())
    stop = CancelWatch(layout, number).look_for_stop()
    assert stop is not None and stop.at_once
    assert said[1:] == ["it has stopped"]


def test_a_local_run_is_cancelled_where_there_is_no_slurm(fake: PreparedSlurm, layout: RunLayout) -> None:
    fake.remove("squeue")
    assert past_incarnation(layout) == 1
    assert cancel(layout)[0] == life.Cancelled((), False, True)
    take_over(layout, Claimant(), {})
    assert cancel(layout)[0] == life.Cancelled((), True, False)


def test_a_submitted_run_is_not_called_cancelled_while_slurm_is_silent(fake: PreparedSlurm, layout: RunLayout) -> None:
    submitted(layout)
    fake.answer("squeue", err="Unable to contact slurm controller", status=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        cancel(layout)


# -- resume -----------------------------------------------------------------------------------------------------------


def test_resuming_submits_again_what_was_submitted_last(
    fake: PreparedSlurm, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(layout, "separate")
    monkeypatch.chdir("/")
    assert life.resume(layout) == {"run": "101", "rollout": "102"}
    first = fake.submitted()[0]
    assert "--cause 'by hand: `milesbatch resume`'" in first and "#SBATCH --chdir=/home/me" in first


@pytest.mark.parametrize("do", [life.resume, life.submitted_order, lambda layout: life.scale(layout, 4)])
def test_a_run_that_was_never_submitted_is_refused(fake: PreparedSlurm, layout: RunLayout, do: object) -> None:
    with pytest.raises(RunMismatchError, match="was never submitted to Slurm") as caught:
        do(layout)  # type: ignore[operator]
    assert caught.value.exit_code == EXIT_USAGE
    assert fake.calls == []


# -- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "jobs", "workers", "submits", "ends"),
    [
        ("het", [("7", "RUNNING", "run")], 2, 0, []),
        ("het", [("7", "RUNNING", "run")], 6, 2, []),
        ("single", [("7", "PENDING", "run"), ("8", "RUNNING", "rollout")], 6, 1, []),
        ("het", [("7", "RUNNING", "run"), ("8", "RUNNING", "rollout"), ("9", "RUNNING", "rollout")], 2, 0, ["9", "8"]),
        ("het", [("7", "RUNNING", "run"), ("8", "PENDING", "rollout"), ("9", "RUNNING", "rollout")], 4, 0, ["8"]),
        ("separate", [("7", "RUNNING", "run"), ("8", "RUNNING", "rollout")], 4, 1, []),
        ("separate", [("8", "RUNNING", "rollout"), ("7", "RUNNING", "run")], 0, 0, ["8"]),
    ],
)
def test_scaling_adds_and_ends_whole_jobs_waiting_and_young_ones_first(
    fake: PreparedSlurm,
    layout: RunLayout,
    shape: str,
    jobs: list[tuple[str, str, str]],
    workers: int,
    submits: int,
    ends: list[str],
) -> None:
    queued(fake, submitted(layout, shape), *jobs)
    done = life.scale(layout, workers)
    assert (len(done.submitted), list(done.ended), done.workers) == (submits, ends, workers)
    assert [words[0] for words in fake.said_to("scancel")] == ends
    assert all("milesbatch.jobs.join" in text for text in fake.submitted())


@pytest.mark.parametrize(("shape", "workers"), [("het", 3), ("het", 1), ("het", 0), ("separate", 3)])
def test_numbers_that_whole_jobs_cannot_reach_are_refused(
    fake: PreparedSlurm, layout: RunLayout, shape: str, workers: int
) -> None:
    queued(fake, submitted(layout, shape))
    with pytest.raises(RunMismatchError) as caught:
        life.scale(layout, workers)
    own = 0 if shape == "separate" else PER_JOB
    assert f"{workers} rollout workers cannot be reached" in str(caught.value)
    assert f"choose one of {own}, {own + 2}, {own + 4}, {own + 6}" in str(caught.value)
    assert fake.submitted() == [] and fake.said_to("scancel") == []


def test_nobody_is_called_for_a_run_that_nothing_runs(fake: PreparedSlurm, layout: RunLayout) -> None:
    queued(fake, submitted(layout, "separate"), ("8", "RUNNING", "rollout"))
    with pytest.raises(RunMismatchError, match="is queued or running that rollout workers could join"):
        life.scale(layout, 4)
    assert fake.submitted() == [] and fake.said_to("scancel") == []


def test_a_resumed_run_keeps_the_rollout_jobs_that_wait_for_it(fake: PreparedSlurm, layout: RunLayout) -> None:
    queued(fake, submitted(layout, "separate"), ("8", "RUNNING", "rollout"))
    assert life.resume(layout) == {"run": "101"}
    assert all("milesbatch.jobs.control" in text for text in fake.submitted())
