"""The process in the batch script: what it is told, whom it may take over from, and when it gives up."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import commit_batch, make_incarnation, make_ref, make_run, past_incarnation
from prepared_slurm import PreparedSlurm

from milesbatch.cluster.context import JobContext
from milesbatch.controller.stopping import Ending, StopCause, StopRequest
from milesbatch.decisions.going_on import BY_HAND
from milesbatch.errors import EXIT_TEMPFAIL, EXIT_USAGE, InputError, RunFailedError, SlurmError
from milesbatch.jobs import control, queue_again
from milesbatch.jobs.control import Batch, main, read_batch
from milesbatch.jobs.order import Order, place_order, write_order
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def order(layout: RunLayout, *overrides: str) -> Order:
    made = place_order(layout, load_recipe(layout.recipe, overrides), Site(name="here"), Path("/home/me"))
    write_order(made)
    return made


def batch(layout: RunLayout, *overrides: str, restarts: int = 0, cause: str = "", after: str = "") -> Batch:
    return Batch(JobContext("33", restarts, "n1", ("n1",)), order(layout, *overrides), ("n9",), after, cause)


# -- what it is told --------------------------------------------------------------------------------------------------


def arguments(made: Order, *more: str) -> list[str]:
    return [str(made.layout.root), "--recipe", str(made.recipe_file), "--site", str(made.site_file), *more]


def test_a_job_knows_itself(fake: PreparedSlurm, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "33")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    made = order(layout)
    found = read_batch(arguments(made, "--excluded", "n1,n2", "--after", "32", "--cause", "a lost node"))
    assert (found.job.job_id, found.excluded, found.after, found.cause) == ("33", ("n1", "n2"), "32", "a lost node")
    assert found.layout == layout and found.order.recipe == made.recipe
    assert read_batch(arguments(made)).excluded == ()


def test_outside_of_slurm_it_is_a_mistake(
    fake: PreparedSlurm, layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="was not started by Slurm"):
        read_batch(arguments(order(layout)))
    monkeypatch.setattr(control, "stamp_output", lambda: None)
    assert main(arguments(order(layout))) == EXIT_USAGE
    assert "error: this process was not started by Slurm" in capsys.readouterr().err


# -- whom it may take over from ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_id", "restart_count", "own_restarts", "gone"),
    [
        ("33", 0, 1, True),
        ("33", 1, 1, False),
        ("local", 0, 0, False),
    ],
)
def test_an_earlier_start_of_this_job_is_gone_for_sure(
    fake: PreparedSlurm, layout: RunLayout, job_id: str, restart_count: int, own_restarts: int, gone: bool
) -> None:
    record = make_incarnation(1, job_id=job_id, restart_count=restart_count)
    assert control._is_gone(batch(layout, restarts=own_restarts), record) is gone
    assert fake.calls == []


@pytest.mark.parametrize(
    ("state", "gone"),
    [
        ("RUNNING", False),
        ("COMPLETING", False),
        ("PENDING", False),
        ("FAILED", True),
        ("NODE_FAIL", True),
        ("EXPEDITING", False),
    ],
)
def test_of_another_job_slurm_tells(fake: PreparedSlurm, layout: RunLayout, state: str, gone: bool) -> None:
    fake.answer("scontrol", f"JobId=32 JobState={state}")
    assert control._is_gone(batch(layout), make_incarnation(1, job_id="32")) is gone


@pytest.mark.parametrize(
    "said", ["slurm_load_jobs error: Invalid job id specified", "Unable to contact slurm controller"]
)
def test_a_job_that_slurm_cannot_tell_about_is_not_called_gone(
    fake: PreparedSlurm, layout: RunLayout, said: str
) -> None:
    fake.answer("scontrol", err=said, status=1)
    assert not control._is_gone(batch(layout), make_incarnation(1, job_id="32"))


# -- giving up --------------------------------------------------------------------------------------------------------


LIMIT = "slurm.max_restarts_without_progress=1"


def test_a_run_that_makes_no_step_gives_up_and_says_why(fake: PreparedSlurm, layout: RunLayout) -> None:
    control._refuse_hopeless(batch(layout, LIMIT))
    past_incarnation(layout)
    control._refuse_hopeless(batch(layout, LIMIT, restarts=1))
    past_incarnation(layout)
    with pytest.raises(RunFailedError, match=r"the last 2 starts of .* recorded no new step") as caught:
        control._refuse_hopeless(batch(layout, LIMIT, restarts=2))
    assert "milesbatch resume" in caught.value.mend
    control._refuse_hopeless(batch(layout, LIMIT, cause=f"{BY_HAND}: `milesbatch resume`"))
    with pytest.raises(RunFailedError):
        control._refuse_hopeless(batch(layout, LIMIT, restarts=1, cause=f"{BY_HAND}: `milesbatch resume`"))


def test_a_step_of_the_last_start_is_progress(fake: PreparedSlurm, layout: RunLayout) -> None:
    past_incarnation(layout)
    past_incarnation(layout)
    commit_batch(layout, 1, [make_ref(group) for group in range(4)], incarnation=2)
    control._refuse_hopeless(batch(layout, LIMIT, restarts=2))


# -- afterwards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.signal, "signal", lambda number, handler: None)


def stopped(cause: StopCause, *nodes: str) -> Ending:
    return Ending(StopRequest(cause, "because", nodes=nodes))


def test_a_finished_run_ends_its_rollout_jobs(fake: PreparedSlurm, layout: RunLayout, signals_stay: None) -> None:
    mark = control.scripts_of(order(layout))[0].text.split("--comment=")[1].split("\n")[0]
    fake.answer("squeue", f"40|RUNNING|None|n1|{mark.replace(':run', ':rollout')}\n")
    assert control._after(batch(layout), Ending()) == 0
    assert fake.said_to("scancel") == [("40",)]


@pytest.mark.parametrize(
    ("cause", "state", "code", "requeued"),
    [
        (StopCause.CANCELLED, "RUNNING", 0, False),
        (StopCause.SIGNAL, "RUNNING", EXIT_TEMPFAIL, True),
        (StopCause.TIME_LIMIT, "RUNNING", EXIT_TEMPFAIL, True),
        (StopCause.SIGNAL, "CANCELLED", EXIT_TEMPFAIL, False),
        (StopCause.SIGNAL, "COMPLETING", EXIT_TEMPFAIL, False),
    ],
)
def test_a_stopped_run_is_queued_again_unless_somebody_ended_it(
    fake: PreparedSlurm, layout: RunLayout, signals_stay: None, cause: StopCause, state: str, code: int, requeued: bool
) -> None:
    fake.answer("scontrol", f"JobId=33 JobState={state}", when="show job")
    assert control._after(batch(layout), stopped(cause)) == code
    asked = [words for words in fake.said_to("scontrol") if "show" not in words]
    assert asked == ([("requeue", "33"), ("update", "jobid=33", "StartTime=now+2")] if requeued else [])


def test_a_run_that_may_not_requeue_stops(fake: PreparedSlurm, layout: RunLayout, signals_stay: None) -> None:
    fake.answer("scontrol", "JobId=33 JobState=RUNNING", when="show job")
    assert control._after(batch(layout, "slurm.requeue=false"), stopped(StopCause.TIME_LIMIT)) == EXIT_TEMPFAIL
    assert all("requeue" not in words for words in fake.said_to("scontrol"))


def test_a_lost_node_leads_to_another_job_without_it(
    fake: PreparedSlurm, layout: RunLayout, signals_stay: None
) -> None:
    fake.answer("scontrol", "JobId=33 JobState=RUNNING", when="show job")
    assert control._after(batch(layout), stopped(StopCause.NODE_LOST, "n2")) == EXIT_TEMPFAIL
    (script,) = fake.submitted()
    assert "#SBATCH --exclude=n9,n2" in script and "--excluded n9,n2 --after 33 --cause because" in script
    assert fake.said_to("scancel") == [("33",)]


def test_when_no_other_job_can_be_had_this_one_is_queued_again(
    fake: PreparedSlurm, layout: RunLayout, signals_stay: None
) -> None:
    fake.answer("scontrol", "JobId=33 JobState=RUNNING", when="show job")
    fake.answer("sbatch", err="sbatch: error: QOSMaxSubmitJobPerUserLimit", status=1)
    assert control._after(batch(layout), stopped(StopCause.NODE_LOST, "n2")) == EXIT_TEMPFAIL
    assert ("requeue", "33") in fake.said_to("scontrol") and fake.said_to("scancel") == []


# -- asking Slurm to start this job again -----------------------------------------------------------------------------


def test_a_slurm_that_restarts_is_asked_again(
    fake: PreparedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_again.time, "sleep", lambda seconds: fake.answer("scontrol", ""))
    fake.answer("scontrol", err="Unable to contact slurm controller", status=1)
    queue_again.queue_again("33", patience_s=5.0)
    assert fake.said_to("scontrol")[:2] == [("requeue", "33"), ("requeue", "33")]


@pytest.mark.parametrize("said", ["Requested operation is presently disabled", "Unable to contact slurm controller"])
def test_a_refusal_and_a_slurm_that_stays_silent_are_errors(fake: PreparedSlurm, said: str) -> None:
    fake.answer("scontrol", err=said, status=1)
    with pytest.raises(SlurmError, match=said):
        queue_again.queue_again("33", patience_s=-1.0)


def test_a_start_that_cannot_be_moved_forward_is_still_a_start(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", err="Access/permission denied", status=1, when="StartTime")
    queue_again.queue_again("33")
