"""Is a run queued, running, or over? With Slurm's answers, without them, and for runs that never met Slurm."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import grow, make_incarnation, make_recipe, make_run
from prepared_slurm import COMMANDS, PreparedSlurm

from milesbatch.decisions.going_on import BY_HAND
from milesbatch.jobs.marks import mark
from milesbatch.recipe.load import dump_recipe
from milesbatch.records import Seal
from milesbatch.report import condition
from milesbatch.report.status import StatusReader, run_status
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import process_started

HERE = socket.gethostname()
GONE = {"host": HERE, "pid": 2**22 + 1, "process_started": "boot:1"}
ALIVE = {"host": HERE, "pid": os.getpid(), "process_started": process_started() or ""}
ELSEWHERE = {"host": "n1.cluster", "pid": 1, "process_started": "boot:1"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    fake = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(fake.path))
    monkeypatch.setattr(condition, "_WATCH_S", 0.1)
    return fake


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_run(tmp_path_factory.mktemp("trained") / "run")
    grow(made, 3)
    return made.root


@pytest.fixture
def layout(tmp_path: Path, trained: Path) -> RunLayout:
    """A run that was submitted, and has trained three of eight steps."""
    made = RunLayout(Path(shutil.copytree(trained, tmp_path / "run")))
    submit(made)
    return made


def submit(layout: RunLayout, **changes: Any) -> None:
    layout.jobs.mkdir(parents=True, exist_ok=True)
    (layout.jobs / "recipe-0123456789ab.yaml").write_text(dump_recipe(make_recipe(**changes)))


def incarnation(layout: RunLayout, number: int = 1, **changes: Any) -> None:
    values = {"job_id": "12", **GONE, **changes}
    layout.incarnation(number).write_bytes(make_incarnation(number, **values).to_bytes())


def says(layout: RunLayout, number: int = 1, **events: dict[str, Any]) -> None:
    log = EventLog(layout, "controller-0", number)
    for name, fields in events.items():
        log.write(name, **fields)
    log.close()


def queue(slurm: PreparedSlurm, layout: RunLayout, *lines: str) -> None:
    """Lines of squeue; ``<run>`` and ``<rollout>`` stand for the marks of the run's jobs."""
    text = "\n".join(lines).replace("<rollout>", mark(layout, "rollout")).replace("<run>", mark(layout, "run"))
    slurm.answer("squeue", text + "\n", when="--me")


def show_job(slurm: PreparedSlurm, state: str, restarts: int = 0) -> None:
    line = f"JobId=12 JobState={state} Reason=None Restarts={restarts} NodeList=n1\n"
    slurm.answer("scontrol", line, when="show job 12")


def is_silent(slurm: PreparedSlurm) -> None:
    """It does not answer any more."""
    for command in COMMANDS:
        slurm.answer(
            command, err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", status=1
        )


# -- without Slurm --------------------------------------------------------------------------------------------------------


def test_a_run_that_was_never_submitted_does_not_ask_slurm(tmp_path: Path, slurm: PreparedSlurm) -> None:
    layout = make_run(tmp_path / "local")
    incarnation(layout, job_id="local")
    says(layout, stopped={"step": 0})
    body = run_status(layout)
    assert (body["state"], body["slurm"], body["jobs"]) == ("stopped", None, [])
    assert slurm.calls == []


def test_slurm_does_not_answer(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(layout, stopped={"step": 3})
    is_silent(slurm)
    found, body = StatusReader(layout).read_both()
    assert body["state"] == "stopped" and body["step"] == 3 and body["jobs"] == []
    assert body["slurm"].startswith("unreachable: slurm_load_jobs error: Unable to contact")
    assert "not known" in body["note"]
    assert not found.is_over, "a job may be queued"


# -- queued ---------------------------------------------------------------------------------------------------------------


def test_submitted_and_nothing_else_yet(tmp_path: Path, slurm: PreparedSlurm) -> None:
    layout = RunLayout(tmp_path / "new")
    submit(layout, steps=50)
    queue(
        slurm, layout, "12|PENDING|Priority||1:00:00|2026-03-01T13:00:00|<run>", "9|RUNNING|None|n9|1:00|N/A|another's"
    )
    found, body = StatusReader(layout).read_both()
    assert (body["state"], body["step"], body["steps"], body["run_id"]) == ("queued", 0, 50, None)
    assert body["jobs"] == [
        {
            "job_id": "12",
            "role": "run",
            "state": "pending",
            "reason": "Priority",
            "nodes": "",
            "time_left_s": 3600.0,
            "starts_at": "2026-03-01T13:00:00",
        }
    ]
    assert body["job_ids"] == ["12"] and "Priority" in body["note"] and not found.is_over


def test_queued_again_after_a_stop(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(layout, stopped={"step": 3})
    queue(slurm, layout, "12|PENDING|BeginTime||1:00:00|N/A|<run>")
    assert run_status(layout)["state"] == "queued"


def test_finished_and_submitted_for_more(layout: RunLayout, slurm: PreparedSlurm) -> None:
    grow_to_the_end(layout)
    assert run_status(layout)["state"] == "finished"
    queue(slurm, layout, "13|PENDING|Resources||1:00:00|N/A|<run>")
    assert run_status(layout)["state"] == "queued"


def grow_to_the_end(layout: RunLayout) -> None:
    from builders import commit_checkpoint

    incarnation(layout, recipe_changes={"steps": 3})
    says(layout, finished={"step": 3})
    commit_checkpoint(layout, 3)


# -- running --------------------------------------------------------------------------------------------------------------


def test_a_job_that_has_not_taken_the_run_over_yet(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(layout, stopped={"step": 3})
    queue(slurm, layout, "13|RUNNING|None|n[1-2]|0:30|2026-03-01T13:00:00|<run>")
    body = run_status(layout)
    assert body["state"] == "running" and "has not taken the run over yet" in body["note"]


def test_alive_on_this_host(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ALIVE)
    queue(
        slurm,
        layout,
        "12+0|RUNNING|None|n1|30:00|x|<run>",
        "12+1|RUNNING|None|n2|30:00|x|",
        "14|PENDING|Priority||1:00:00|N/A|<rollout>",
    )
    found, body = StatusReader(layout).read_both()
    assert body["state"] == "running" and "does not answer" in body["note"] and not found.is_over
    assert [(job["job_id"], job["role"], job["nodes"]) for job in body["jobs"]] == [
        ("12", "run", "n1,n2"),
        ("14", "rollout", ""),
    ]
    assert body["jobs"][0]["time_left_s"] == 1800


def test_alive_and_ending(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ALIVE)
    says(layout, failed={"error": "x", "exit_code": 1})
    body = run_status(layout)
    assert (body["state"], body["cause"]) == ("draining", "x")


@pytest.fixture
def controller() -> Iterator[str]:
    """Something that answers as a controller does; yields its address."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(
                {"state": "running", "workers": [{"name": "rollout-0"}], "waiting_for": "x", "tokens_per_s": 5.0}
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_controller_elsewhere_that_answers(layout: RunLayout, slurm: PreparedSlurm, controller: str) -> None:
    incarnation(layout, **ELSEWHERE)
    layout.liveness(1).write_text(json.dumps({"host": "n1.cluster", "address": controller, "count": 1}))
    body = run_status(layout)
    assert (body["state"], body["workers"], body["tokens_per_s"]) == ("running", [{"name": "rollout-0"}], 5.0)


# -- a controller elsewhere that gives no sign ----------------------------------------------------------------------------


def test_no_sign_and_its_job_runs(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ELSEWHERE)
    queue(slurm, layout, "12|RUNNING|None|n1|30:00|x|<run>")
    show_job(slurm, "RUNNING")
    found, body = StatusReader(layout).read_both()
    assert body["state"] == "unknown" and "n1.cluster" in body["note"] and body["cause"] is None
    assert not found.is_over


def test_no_sign_and_slurm_does_not_answer(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ELSEWHERE)
    is_silent(slurm)
    assert run_status(layout)["state"] == "unknown"


def test_no_sign_of_a_local_run_elsewhere(tmp_path: Path, slurm: PreparedSlurm) -> None:
    layout = make_run(tmp_path / "local")
    incarnation(layout, job_id="local", **ELSEWHERE)
    assert run_status(layout)["state"] == "unknown"


@pytest.mark.parametrize("state", ["NODE_FAIL", "TIMEOUT", "FAILED"])
def test_no_sign_and_its_job_is_over(layout: RunLayout, slurm: PreparedSlurm, state: str) -> None:
    incarnation(layout, **ELSEWHERE)
    show_job(slurm, state)
    (layout.logs / "slurm-run-12.log").write_text("step 3/8\nslurmstepd: error: *** JOB 12 CANCELLED ***\n")
    found, body = StatusReader(layout).read_both()
    assert body["state"] == "stopped" and found.is_over and found.exit_code == 75
    assert "lost without a word" in body["cause"] and state in body["cause"]
    assert body["failure"]["name"] == "controller-0" and body["failure"]["host"] == "n1.cluster"
    assert body["failure"]["lines"] == ["step 3/8"] and body["failure"]["log"] == "logs/slurm-run-12.log"


def test_no_sign_and_slurm_has_forgotten_its_job(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ELSEWHERE)
    slurm.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified", status=1, when="show job")
    assert run_status(layout)["state"] == "stopped"


def test_no_sign_and_its_job_was_started_again(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout, **ELSEWHERE)
    queue(slurm, layout, "12|RUNNING|None|n1|30:00|x|<run>")
    show_job(slurm, "RUNNING", restarts=1)
    body = run_status(layout)
    assert body["state"] == "running" and "not taken the run over" in body["note"]


# -- over -----------------------------------------------------------------------------------------------------------------


def test_a_role_that_made_the_run_fail(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    (layout.log("trainer-1", 1)).write_text(
        "x-0, start 1, on n1, process 5\nold\ntrainer-1, start 2, on n1, process 6\nerror: the disk is full\n"
    )
    says(
        layout,
        process_ended={
            "name": "trainer-1",
            "exit_code": 1,
            "reason": "exit status 1",
            "host": "n1",
            "said": "the disk is full",
        },
        failed={"error": "trainer-1 died 4 times", "exit_code": 1},
    )
    found, body = StatusReader(layout).read_both()
    assert (body["state"], body["cause"], found.exit_code) == ("failed", "trainer-1 died 4 times", 1)
    assert body["failure"] == {
        "name": "trainer-1",
        "host": "n1",
        "exit_code": 1,
        "reason": "exit status 1",
        "log": "logs/trainer-1.i000001.log",
        "lines": ["error: the disk is full"],
        "try": "",
    }
    assert [(end["name"], end["said"]) for end in body["process_ends"]] == [("trainer-1", "the disk is full")]


def test_a_failure_of_the_controller_itself(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(
        layout,
        process_started={"name": "trainer-1"},
        failed={"error": "90% of the episodes failed\n  first: x", "exit_code": 1},
    )
    body = run_status(layout)
    assert body["failure"]["name"] == "controller-0" and body["failure"]["lines"] == [
        "90% of the episodes failed",
        "  first: x",
    ]


def test_an_error_before_any_incarnation(tmp_path: Path, slurm: PreparedSlurm) -> None:
    layout = RunLayout(tmp_path / "new")
    submit(layout)
    layout.logs.mkdir()
    (layout.logs / "slurm-run-9.log").write_text("2026-03-01T12:00:00.000000Z error: of an earlier job\n")
    (layout.logs / "slurm-run-12.log").write_text(
        "2026-03-01T12:00:00.000000Z new run\n2026-03-01T12:00:05.000000Z error: no module nothere\n"
        "2026-03-01T12:00:05.000010Z   what to do: install it\nsrun: error: n1\n"
    )
    found, body = StatusReader(layout).read_both()
    assert (body["state"], body["cause"], found.exit_code) == ("failed", "no module nothere", 1)
    assert body["failure"]["lines"] == ["no module nothere", "  what to do: install it"]


def test_an_error_after_the_last_incarnation_counts_and_an_older_one_does_not(
    layout: RunLayout, slurm: PreparedSlurm
) -> None:
    incarnation(layout)
    log = layout.logs / "slurm-run-12.log"
    log.write_text("2020-03-01T12:00:00.000000Z error: old\n")
    says(layout, stopped={"step": 3, "cause": "time_limit"})
    assert run_status(layout)["state"] == "stopped"
    log.write_text("2999-03-01T12:00:00.000000Z error: the last 4 starts recorded no new step\n")
    body = run_status(layout)
    assert (body["state"], body["cause"]) == ("failed", "the last 4 starts recorded no new step")
    log.write_text("2999-03-01T12:00:00.000000Z error: x\n2999-03-01T12:00:09.000000Z incarnation 2 of run\n")
    assert run_status(layout)["state"] == "stopped"


@pytest.mark.parametrize(("state", "shown"), [("FAILED", "failed"), ("CANCELLED", "stopped")])
def test_a_job_that_ended_before_python_began(layout: RunLayout, slurm: PreparedSlurm, state: str, shown: str) -> None:
    log = layout.logs / "slurm-run-12.log"
    log.write_text("/var/spool/job12/script: line 9: /nope/python: No such file or directory\n")
    show_job(slurm, state)
    body = run_status(layout)
    assert body["state"] == shown
    if shown == "failed":
        assert body["cause"] == "job 12 ended before it had a controller; Slurm says: FAILED"
        assert "/nope/python: No such file" in body["failure"]["lines"][0]


def test_a_controller_whose_guard_saw_it_killed(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(layout, controller_killed={"signal": "SIGKILL"})
    body = run_status(layout)
    assert (body["state"], body["cause"]) == ("stopped", "the controller was killed by SIGKILL")
    assert body["failure"]["exit_code"] == -9


def test_a_job_that_is_ending(layout: RunLayout, slurm: PreparedSlurm) -> None:
    incarnation(layout)
    says(layout, stopped={"step": 3})
    queue(slurm, layout, "12|COMPLETING|None|n1|30:00|x|<run>")
    body = run_status(layout)
    assert (body["state"], body["note"]) == (
        "stopped",
        "job 12 is ending; whether Slurm starts it again shows when it has ended",
    )


# -- restarts and nodes ---------------------------------------------------------------------------------------------------


def test_restarts_and_excluded_nodes(layout: RunLayout, slurm: PreparedSlurm) -> None:
    def lose(number: int, node: str) -> None:
        says(
            layout,
            number,
            stopping={"cause": "node_lost", "text": f"node {node} is lost", "nodes": [node]},
            stopped={"step": 3},
        )

    seal = Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=())
    for number, (cause, node) in enumerate(
        [("first", "n1"), ("n1 lost", "n2"), (f"{BY_HAND}: resume", "n3"), ("n3 lost", "n4")], 1
    ):
        incarnation(layout, number, cause=cause, job_id=str(10 + number), seal=seal)
        lose(number, node)
    body = run_status(layout)
    assert [(node["node"], node["reason"], node["incarnation"]) for node in body["excluded_nodes"]] == [
        ("n3", "node n3 is lost", 3),
        ("n4", "node n4 is lost", 4),
    ]
    assert [(restart["incarnation"], restart["cause"], restart["job_id"]) for restart in body["restarts"]] == [
        (2, "n1 lost", "12"),
        (3, f"{BY_HAND}: resume", "13"),
        (4, "n3 lost", "14"),
    ]


def test_a_reader_that_looks_again_sees_what_is_new(layout: RunLayout, slurm: PreparedSlurm) -> None:
    from builders import commit_batch, publish, write_groups

    incarnation(layout)
    says(layout, stopped={"step": 3})
    reader = StatusReader(layout)
    assert reader.read()["step"] == 3
    publish(layout, [4])
    commit_batch(layout, 4, write_groups(layout, range(12, 16), version=2))
    assert (reader.read()["step"], reader.read()["policy_version"]) == (4, 4)
