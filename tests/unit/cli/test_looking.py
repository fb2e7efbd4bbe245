"""``status``, ``watch`` and ``logs`` as they are typed, on prepared runs without a Slurm."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import make_incarnation, make_recipe, make_run, save_unfinished
from rich.console import Console
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.cli.runs import find_run, find_submitted
from milesbatch.cli.screen import duration, rows, screen
from milesbatch.cli.watch import line_of
from milesbatch.errors import InputError
from milesbatch.recipe.load import dump_recipe
from milesbatch.report.status import run_status
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout

AT = "2026-03-01T12:00:00.000000Z"


def ended_run(root: Path, **events: dict[str, Any]) -> RunLayout:
    """A local run whose controller, on this host, is gone; its last words are ``events``."""
    import socket

    layout = make_run(root)
    record = make_incarnation(1, host=socket.gethostname(), pid=2**22 + 1)
    layout.incarnation(1).write_bytes(record.to_bytes())
    log = EventLog(layout, "controller-0", 1)
    for name, fields in events.items():
        log.write(name, **fields)
    log.close()
    return layout


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


# -- screen ---------------------------------------------------------------------------------------------------------------


def crowded_body(tmp_path: Path) -> dict[str, Any]:
    """A run with everything at once."""
    body = run_status(ended_run(tmp_path / "run", stopped={"step": 0}))
    restart = {"incarnation": 2, "at": AT, "cause": "the node was lost " * 9, "job_id": "1", "host": "n1"}
    job = {
        "job_id": "12",
        "role": "run",
        "state": "live",
        "reason": "",
        "nodes": "n[1-64]",
        "time_left_s": 3725.0,
        "starts_at": "",
    }
    worker = {"name": "rollout-0", "state": "generating", "policy_version": 3, "samples_in_flight": 8, "host": "n7"}
    worker |= {"servers": "rollout-0.server-1 is starting", "leases": 2, "groups_in_flight": 8}
    end = {"at": AT, "name": "trainer-1", "host": "n1", "reason": "killed by SIGKILL", "said": "x\ny", "exit_code": -9}
    node = {"node": "n9", "at": AT, "reason": "no heartbeat", "incarnation": 1}
    return body | {
        "restarts": [restart | {"incarnation": number} for number in range(2, 30)],
        "jobs": [
            job,
            *(
                {**job, "job_id": str(20 + n), "role": "rollout", "state": "pending", "reason": "Priority"}
                for n in range(5)
            ),
        ],
        "workers": [worker | {"name": f"rollout-{number}"} for number in range(64)],
        "process_ends": [end] * 10,
        "excluded_nodes": [node] * 4,
        "cause": "it failed\nbadly",
        "failure": {
            "name": "trainer-1",
            "host": "n1",
            "exit_code": -9,
            "reason": "killed by SIGKILL",
            "log": "logs/x",
            "lines": ["said"],
            "try": "less of everything",
        },
        "reward_mean": 0.5,
        "rewards": [0.1, 0.5],
        "evaluation": {
            "version": 40,
            "reward_mean": 0.25,
            "reward_std": 0.4,
            "at": AT,
            "best_version": 30,
            "best_reward_mean": 0.5,
            "versions": 5,
        },
        "unfinished_saved": 3,
        "queue": {"ready": 12, "stale": 3, "in_flight": 512, "leases": 128},
        "disk_bytes": {
            "total": 10**12,
            "trajectories": 10**11,
            "weights": 8 * 10**11,
            "checkpoints": 10**11,
            "other": 5,
            "is_estimate": True,
        },
        "lag": {"mean": 1.0, "max": 2.0},
        "waiting_for": "rollout",
        "tokens_per_s": 100.0,
        "slurm": "unreachable: no answer",
    }


def shown(body: dict[str, Any], width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(screen(body, width=width, height=height))
    return capture.get().splitlines()


def test_the_curve_says_what_it_is_and_goes_first_where_there_is_little_room(tmp_path: Path) -> None:
    body = crowded_body(tmp_path)
    (line,) = [line for line in shown(body, 120, 200) if "reward curve" in line]
    assert "0.500 (from 0.100), last 2 steps" in line
    assert not [line for line in shown(body, 80, 20) if "reward curve" in line]


def test_a_crowded_run_fits_a_small_terminal(tmp_path: Path) -> None:
    lines = shown(crowded_body(tmp_path), 80, 23)
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in (
        "trainer-1 on n1",
        "12 (run) live",
        "unreachable",
        "incarnation 29",
        "rollout-0",
        "n9",
        "63 more",
        "version 40: reward 0.250, held out; best 0.500 (version 30)",
        "12 groups ready (3 stale), 512 in flight in 128 leases",
        "~1 TB: trajectories 100 GB, weights 800 GB, checkpoints 100 GB",
        "died",
        "event",
    ):
        assert word in text, word


def test_a_larger_terminal_shows_more(tmp_path: Path) -> None:
    body = crowded_body(tmp_path)
    assert [len(shown(body, 120, height)) for height in (23, 40, 80)] == [23, 40, 80]
    (line,) = [line for line in shown(body, 120, 80) if "rollout-9" in line]
    assert "generating, version 3; 8 samples of 8 groups (2 leases) on n7" in line


def test_a_controller_that_says_nothing_of_its_queue(tmp_path: Path) -> None:
    body = crowded_body(tmp_path)
    old = [
        {k: v for k, v in worker.items() if k not in ("servers", "leases", "groups_in_flight")}
        for worker in body["workers"]
    ]
    found = dict(rows({**body, "queue": None, "workers": old, "disk_bytes": None, "disk_free_bytes": None}))
    assert "queue" not in found and "disk" not in found
    assert found["  rollout-0"] == "generating, version 3; 8 samples on n7"


def test_everything_is_shown_without_a_limit(tmp_path: Path) -> None:
    found = rows(crowded_body(tmp_path))
    assert len([label for label, _ in found if label.startswith("  rollout-")]) == 64
    assert ("  job", "12 (run) live on n[1-64], 1:02:05 left") in found
    assert ("  job", "20 (rollout) pending on n[1-64] (Priority)") in found


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    body = crowded_body(tmp_path)
    found = rows(body, 40)
    cut = [text for label, text in found if label == "  restart"]
    left_out = int(cut[0].split()[0].lstrip("("))
    assert left_out + len(cut) - 1 == 28 and cut[-1].startswith("incarnation 29")


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.9, 3600, 90061)] == ["0:00:00", "0:00:59", "1:00:00", "25:01:01"]


# -- commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "code", "state"),
    [
        ({"stopped": {"step": 0}}, 75, "stopped"),
        ({"failed": {"error": "the disk is full", "exit_code": 1}}, 1, "failed"),
        ({}, 75, "stopped"),
    ],
)
def test_watch_ends_with_the_run(tmp_path: Path, events: dict[str, Any], code: int, state: str) -> None:
    ended = run("watch", str(ended_run(tmp_path / "run", **events).root))
    assert ended.exit_code == code
    assert f"  {state}" in ended.stdout and len(ended.stdout.splitlines()) == 1


def test_a_run_whose_controller_ends_badly_names_the_cause_at_once(tmp_path: Path) -> None:
    """While it still ends its processes, and makes the last report."""
    import os
    import socket

    from milesbatch.store.liveness import process_started

    layout = ended_run(tmp_path / "run", failed={"error": "the disk is full", "exit_code": 1})
    record = make_incarnation(1, host=socket.gethostname(), pid=os.getpid(), process_started=process_started())
    layout.incarnation(1).write_bytes(record.to_bytes())
    body = run_status(layout)
    assert (body["state"], body["cause"]) == ("draining", "the disk is full")


def test_watch_tells_only_what_changed(tmp_path: Path) -> None:
    body = crowded_body(tmp_path)
    later = {**body, "jobs": [{**job, "time_left_s": 1.0} for job in body["jobs"]]}
    assert line_of(body) == line_of(later)
    assert "Slurm does not answer" in line_of(body) and "it failed;" in line_of(body)


def test_watch_names_servers_that_do_not_work(tmp_path: Path) -> None:
    body = run_status(ended_run(tmp_path / "run", stopped={"step": 0}))
    quiet = {"name": "rollout-0", "servers": ""}
    ill = {"name": "rollout-1", "servers": "rollout-1.server-0 ended (killed by signal 9)\nand more"}
    assert line_of({**body, "workers": [quiet]}).endswith("incarnation 1, 1 worker")
    line = line_of({**body, "workers": [quiet, ill, {"name": "of an older controller"}]})
    assert line.endswith("incarnation 1, 3 workers; rollout-1: rollout-1.server-0 ended (killed by signal 9)")


def test_status_is_a_line_for_each_thing_when_nobody_looks(tmp_path: Path) -> None:
    error = "a long error " * 20
    ended = run("status", str(ended_run(tmp_path / "run", failed={"error": error, "exit_code": 1}).root))
    assert ended.exit_code == 1
    assert f"cause            {error}" in ended.stdout.splitlines()


def test_status_says_each_thing_of_a_bad_end_once(tmp_path: Path) -> None:
    mend = "make that filesystem writable again"
    ended = {"name": "rollout-0", "exit_code": 93, "reason": "exit status 93", "host": "vm", "said": "cannot write /x"}
    for place, error in enumerate(("cannot write /x", f"cannot write /x\n  what to do: {mend}")):
        events = {"process_ended": ended, "failed": {"error": error, "exit_code": 1}}
        layout = ended_run(tmp_path / f"run{place}", **events)
        log = layout.log("rollout-0", 1)
        log.write_text(f"error: cannot write /x\n  what to do: {mend}\n")
        found = rows(run_status(layout))
        told = [row for row in found if row[0] in ("cause", "  who", "  it said", "  to try")]
        assert told == [
            ("cause", "cannot write /x"),
            ("  who", f"rollout-0 on vm, exit status 93; see {log.relative_to(layout.root)}"),
            ("  to try", mend),
        ]


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        (93, "exit status 93", "exit status 93"),
        (1, "exit status 1, out of memory", "exit status 1, out of memory"),
        (-9, "killed by SIGKILL", "killed by SIGKILL"),
        (-9, "no heartbeat for 60 s", "no heartbeat for 60 s"),
        (-9, "it died", ""),
        (1, "it died", "exit status 1"),
        (1, "the node was lost", "exit status 1: the node was lost"),
        (None, "the node was lost", "the node was lost"),
    ],
)
def test_how_it_ended_is_said_once(tmp_path: Path, code: int | None, reason: str, words: str) -> None:
    failure = {
        "name": "rollout-0",
        "host": "vm",
        "exit_code": code,
        "reason": reason,
        "log": "",
        "lines": [],
        "try": "",
    }
    body = {**run_status(ended_run(tmp_path / "run")), "cause": "it died 4 times\n  it said: no", "failure": failure}
    found = rows(body)
    assert ("  who", "rollout-0 on vm" + (f", {words}" if words else "")) in found
    assert ("cause", "it died 4 times") in found and ("  it said", "no") in found


def test_status_says_how_many_unfinished_episodes_are_saved(tmp_path: Path) -> None:
    layout = ended_run(tmp_path / "run", stopped={"step": 0, "cause": "signal", "text": "SIGTERM"})
    assert run_status(layout)["unfinished_saved"] == 0
    assert "unfinished" not in dict(rows(run_status(layout)))
    save_unfinished(layout, range(2))
    save_unfinished(layout, range(2, 4))
    assert run_status(layout)["unfinished_saved"] == 4
    assert dict(rows(run_status(layout)))["unfinished"] == "4 episodes are saved, to be continued"


def test_status_as_json(tmp_path: Path) -> None:
    ended = run("status", str(ended_run(tmp_path / "run", stopped={"step": 0}).root), "--json")
    assert ended.exit_code == 0 and json.loads(ended.stdout)["state"] == "stopped"


def test_logs_show_time_incarnation_and_process(tmp_path: Path) -> None:
    layout = ended_run(tmp_path / "run")
    layout.log("trainer-0", 1).write_text(f"{AT} loading\nno time of its own\n")
    assert run("logs", str(layout.root)).stdout.splitlines() == [
        "2026-03-01T12:00:00.000Z i1 trainer-0: loading",
        "2026-03-01T12:00:00.000~ i1 trainer-0: no time of its own",
    ]


def test_logs_say_that_there_is_more(tmp_path: Path) -> None:
    layout = ended_run(tmp_path / "run")
    layout.log("trainer-0", 1).write_text(f"{AT} a\n{AT} b\n{AT} c\n")
    few = run("logs", str(layout.root), "--lines", "2")
    assert len(few.stdout.splitlines()) == 2 and "--lines 0 shows all" in few.stderr
    everything = run("logs", str(layout.root), "--lines", "0")
    assert len(everything.stdout.splitlines()) == 3 and everything.stderr == ""


def test_logs_follow_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from milesbatch.cli import following, logs

    monkeypatch.setattr(logs, "_LOOK_S", 0.02)
    monkeypatch.setattr(following, "_OVER_S", 0.3)
    layout = ended_run(tmp_path / "run")
    import os
    import socket

    from milesbatch.store.liveness import process_started

    record = make_incarnation(1, host=socket.gethostname(), pid=os.getpid(), process_started=process_started())
    layout.incarnation(1).write_bytes(record.to_bytes())
    layout.log("trainer-0", 1).write_text(f"{AT} old\n")

    def go_on() -> None:
        time.sleep(0.2)
        with open(layout.log("trainer-0", 1), "a") as stream:
            stream.write(f"{AT} new\n")
        time.sleep(0.2)
        with open(layout.log("trainer-0", 1), "a") as stream:
            stream.write(f"{AT} last")
        layout.incarnation(1).write_bytes(make_incarnation(1, host=socket.gethostname(), pid=2**22 + 1).to_bytes())

    thread = threading.Thread(target=go_on)
    thread.start()
    ended = run("logs", str(layout.root), "-f")
    thread.join()
    assert ended.exit_code == 0
    assert [line.rpartition(" ")[2] for line in ended.stdout.splitlines()] == ["old", "new", "last"]


def test_following_a_run_that_is_over_and_has_no_logs(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    ended = run("logs", str(layout.root), "-f")
    assert isinstance(ended.exception, InputError) and "nothing of it is running" in str(ended.exception)


def test_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILESBATCH_RUNS", str(tmp_path))
    made = make_run(tmp_path / "made")
    queued = RunLayout(tmp_path / "queued")
    queued.jobs.mkdir(parents=True)
    (queued.jobs / "recipe-0123456789ab.yaml").write_text(dump_recipe(make_recipe()))
    assert find_submitted("made").root == find_run("made").root == made.root
    assert find_submitted("queued").root == find_submitted(str(queued.root)).root == queued.root
    with pytest.raises(InputError, match=r"runs under .*: made; submitted: queued"):
        find_run("queued")
    with pytest.raises(InputError, match="there is no run at"):
        find_submitted("none")
