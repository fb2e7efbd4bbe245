"""Slurm's answers as values, from recorded answers of Slurm 22.05; and what becomes of no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prepared_slurm import PreparedSlurm

from milesbatch.cluster import slurm
from milesbatch.decisions.job_states import JobState
from milesbatch.errors import EXIT_NOT_WELL, SlurmError

RECORDED = Path(__file__).parent / "recorded"
UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified\n"
MARK = "milesbatch:0123456789abcdef"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    made = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(made.path))
    return made


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_a_heterogeneous_job_has_its_leaders_id_and_its_components_in_order(fake: PreparedSlurm) -> None:
    lines = recorded("job-het-running").splitlines()
    fake.answer("scontrol", "\n".join(reversed(lines)) + "\n\n")
    leader, second = slurm.job("33")
    assert (leader.job_id, leader.het_offset, leader.name) == ("33", 0, "33")
    assert (second.job_id, second.het_offset, second.name) == ("33", 1, "33+1")
    assert (leader.state, leader.nodes, second.nodes) == (JobState.LIVE, "n1", "n[2-3]")
    assert (leader.reason, leader.restarts, leader.comment) == ("", 0, f"{MARK}:run")
    assert fake.said_to("scontrol") == [("--oneliner", "show", "job", "33")]


@pytest.mark.parametrize(
    ("name", "state", "reason", "restarts"),
    [
        ("job-held", JobState.PENDING, "JobHeldUser", 0),
        ("job-het-requeued", JobState.PENDING, "BeginTime", 1),
        ("job-het-cancelled", JobState.CANCELLED, "BeginTime", 1),
    ],
)
def test_states_as_scontrol_tells_them(
    fake: PreparedSlurm, name: str, state: JobState, reason: str, restarts: int
) -> None:
    fake.answer("scontrol", recorded(name))
    found = slurm.job("33")[0]
    assert (found.state, found.reason, found.restarts, found.nodes) == (state, reason, restarts, "")
    assert slurm.job_state("33") is state


def test_a_job_that_slurm_has_forgotten_is_unknown_and_not_over(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", err=UNKNOWN_JOB, status=1)
    assert slurm.job("99999") == ()
    assert slurm.job_state("99999") is JobState.UNKNOWN


def test_my_jobs_are_those_that_may_run_without_arrays(fake: PreparedSlurm) -> None:
    fake.answer("squeue", recorded("queue"))
    found = {job.name: job for job in slurm.my_jobs()}
    assert sorted(found) == ["33", "33+1", "35"]
    assert (found["33+1"].state, found["33+1"].nodes, found["33+1"].comment) == (JobState.LIVE, "n[2-3]", f"{MARK}:run")
    assert (found["35"].state, found["35"].reason) == (JobState.PENDING, "JobHeldUser")


def test_a_comment_may_hold_the_separator(fake: PreparedSlurm) -> None:
    fake.answer("squeue", "7|RUNNING|None|n1|a|b\n")
    assert [job.comment for job in slurm.my_jobs()] == ["a|b"]


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:57", 297.0),
        ("0:00", 0.0),
        ("1:00:00", 3600.0),
        ("1-00:00:01", 86401.0),
        ("13-02:03:04", 13 * 86400.0 + 7384),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
        ("5", None),
        ("-1:00", None),
    ],
)
def test_times_as_slurm_spells_them(text: str, seconds: float | None) -> None:
    assert slurm.parse_time(text) == seconds


def test_the_time_left_is_the_leaders(fake: PreparedSlurm) -> None:
    fake.answer("squeue", "4:57\n4:58\n")
    assert slurm.time_left_s("33") == 297.0
    fake.answer("squeue", "UNLIMITED\n")
    assert slurm.time_left_s("33") is None
    fake.answer("squeue", "")
    assert slurm.time_left_s("33") is None


def test_no_answer_about_the_time_is_not_unlimited_time(fake: PreparedSlurm) -> None:
    fake.answer("squeue", err=UNKNOWN_JOB, status=1)
    with pytest.raises(SlurmError, match="Invalid job id"):
        slurm.time_left_s("99999")


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_nodes(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", recorded("node-mixed"), when="node n1")
    fake.answer("scontrol", recorded("node-lost"), when="node n8")
    there, lost = slurm.node("n1"), slurm.node("n8")
    assert (there.name, there.address, there.state, there.is_lost) == ("n1", "127.0.0.1", "MIXED", False)
    assert (lost.state, lost.is_lost) == ("DOWN+NOT_RESPONDING", True)


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ("IDLE", False),
        ("ALLOCATED", False),
        ("MIXED+DRAIN", False),
        ("COMPLETING", False),
        ("RESERVED", False),
        ("ALLOCATED*", True),
        ("IDLE+NOT_RESPONDING", True),
        ("DOWN", True),
        ("ALLOCATED+FAIL", True),
    ],
)
def test_lost_nodes(state: str, lost: bool) -> None:
    assert slurm.NodeFacts("n1", "n1", state).is_lost is lost


def test_a_node_without_an_address_goes_by_its_name(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", "NodeName=n1 State=IDLE\n")
    assert slurm.node("n1").address == "n1"


def test_names_of_a_short_form(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", "n1\nn2\nn3\nn7\n")
    assert slurm.expand("n[1-3],n7") == ("n1", "n2", "n3", "n7")
    assert fake.said_to("scontrol") == [("show", "hostnames", "n[1-3],n7")]


# -- acting -----------------------------------------------------------------------------------------------------------


def test_a_step_is_found_in_every_component_by_the_components_own_id(fake: PreparedSlurm) -> None:
    """As recorded: squeue lists steps of a later component only under the component's id."""
    fake.answer("scontrol", recorded("job-het-running"))
    fake.answer("squeue", "33.1 trainer-0.1\n33.batch batch\n", when="--jobs 33 ")
    fake.answer("squeue", "34.0 rollout-0.1\n33.1 trainer-0.1\n33.batch batch\n", when="--jobs 33,34 ")
    slurm.end_step("33", "rollout-0.1")
    slurm.end_step("33", "trainer-0.2")
    assert fake.said_to("scancel") == [("--signal=KILL", "34.0")]


@pytest.mark.parametrize(
    "said",
    [
        "scancel: error: Kill job error on job id 7: Job/step already completing or completed",
        "Invalid job id specified",
    ],
)
def test_cancelling_what_is_over_is_fine(fake: PreparedSlurm, said: str) -> None:
    fake.answer("scancel", err=said, status=1)
    slurm.cancel("7")
    fake.answer("scancel", err="scancel: error: Kill job error on job id 7: Access/permission denied", status=1)
    with pytest.raises(SlurmError, match="permission denied"):
        slurm.cancel("7")


def test_requeueing_a_pending_job_has_worked_although_slurm_complains(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", err="Job is pending execution for job 35\n", status=1)
    slurm.requeue("35")
    fake.answer("scontrol", err="Invalid job id specified for job 99999\n", status=1)
    with pytest.raises(SlurmError, match="Invalid job id"):
        slurm.requeue("99999")


def test_every_component_of_a_pending_job_gets_the_exclusions(fake: PreparedSlurm) -> None:
    fake.answer("scontrol", recorded("job-het-requeued"), when="show job")
    slurm.exclude("33", ["n4", "n5"])
    assert fake.said_to("scontrol")[1:] == [
        ("update", "jobid=33", "ExcNodeList=n4,n5"),
        ("update", "jobid=33+1", "ExcNodeList=n4,n5"),
    ]


def test_the_other_commands(fake: PreparedSlurm) -> None:
    slurm.signal_batch("7", "USR1")
    slurm.start_soon("7")
    slurm.comment("7", "a b")
    assert fake.said_to("scancel") == [("--batch", "--signal=USR1", "7")]
    assert fake.said_to("scontrol") == [("update", "jobid=7", "StartTime=now+2"), ("update", "jobid=7", "Comment=a b")]


# -- no answer --------------------------------------------------------------------------------------------------------


def test_a_missing_command_says_what_to_do(fake: PreparedSlurm) -> None:
    fake.remove("squeue")
    with pytest.raises(SlurmError) as caught:
        slurm.my_jobs()
    assert "there is no command squeue" in str(caught.value) and "milesbatch run" in str(caught.value)
    assert (caught.value.exit_code, caught.value.may_be_asked_again) == (EXIT_NOT_WELL, False)


def test_a_command_that_does_not_answer_may_be_asked_again(fake: PreparedSlurm) -> None:
    fake.hang("squeue")
    with pytest.raises(SlurmError, match=r"`squeue --me` did not answer within 0 s") as caught:
        slurm.run_slurm(["squeue", "--me"], timeout_s=0.2)
    assert caught.value.may_be_asked_again


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", True),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", True),
        ("squeue: error: Invalid user id: me", False),
        ("", False),
    ],
)
def test_a_failed_command_repeats_slurms_words(fake: PreparedSlurm, said: str, again: bool) -> None:
    fake.answer("squeue", err=said, status=3)
    with pytest.raises(SlurmError) as caught:
        slurm.my_jobs()
    assert "ended with exit status 3" in caught.value.what and said in caught.value.what
    assert caught.value.may_be_asked_again is again


def test_a_command_that_cannot_be_started_is_an_error_too(fake: PreparedSlurm) -> None:
    (fake.path / "squeue").write_text("\x7fELF not a program")
    with pytest.raises(SlurmError, match="could not be started"):
        slurm.my_jobs()


def test_bytes_that_are_not_utf_8_do_not_stop_anybody(fake: PreparedSlurm) -> None:
    (fake.path / "squeue").write_bytes(b"#!/bin/sh\nprintf '7|RUNNING|None|n1|caf\\351\\n'\n")
    assert [job.comment for job in slurm.my_jobs()] == ["caf\N{REPLACEMENT CHARACTER}"]


GARBAGE = "slurm is being upgraded, come back later\n"


@pytest.mark.parametrize(
    "ask",
    [slurm.my_jobs, slurm.queue, lambda: slurm.job("7"), lambda: slurm.job_state("7")],
    ids=["my_jobs", "queue", "job", "job_state"],
)
def test_an_answer_that_makes_no_sense_is_no_answer(fake: PreparedSlurm, ask: Callable[[], object]) -> None:
    fake.answer("squeue", GARBAGE)
    fake.answer("scontrol", GARBAGE)
    with pytest.raises(SlurmError, match="upgraded"):
        ask()


def test_garbage_where_nothing_depends_on_it(fake: PreparedSlurm) -> None:
    fake.answer("squeue", GARBAGE)
    fake.answer("scontrol", GARBAGE)
    assert slurm.time_left_s("7") is None
    assert slurm.node("n1").state == "UNKNOWN" and not slurm.node("n1").is_lost
    assert slurm.end_step("7", "trainer-0.1") is None
    assert fake.said_to("scancel") == []
