"""The report as an artefact of the MLflow run when a run has ended: made without being asked, and never a reason to fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import grow, make_recipe, make_run, past_incarnation
from mlflow import MlflowClient

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.local import run_limited
from milesbatch.recipe.models import Tracking
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.tracking import follow as following
from milesbatch.tracking import last_report
from milesbatch.tracking.attach import MlflowRun
from milesbatch.tracking.last_report import attach_report, wants_report


def tracked(root: Path, ending: str = "finished", **tracking: Any) -> RunLayout:
    """A run of two steps with its event logs; nothing of it was logged yet."""
    layout = make_run(root, make_recipe(steps=2, tracking=tracking))
    past_incarnation(layout)
    grow(layout, 2)
    trainer, controller = EventLog(layout, "trainer-0", 1), EventLog(layout, "controller-0", 1)
    for step in (1, 2):
        trainer.write("train_step", step=step, replayed=False, weights_digest="", metrics={"reward_mean": step / 8})
    controller.write(ending, **({"error": "the disk is full", "exit_code": 1} if ending == "failed" else {"step": 2}))
    return layout


def context(layout: RunLayout, incarnation: int) -> RoleContext:
    return RoleContext(layout.root.resolve(), "tracking", 0, 1, incarnation, 1, "", "", 0, 1.0)


def track(layout: RunLayout, incarnation: int = 1) -> str:
    """Run the tracking process of an incarnation to its end; what it printed."""
    environment = {**os.environ, **context(layout, incarnation).to_environment()}
    command = [sys.executable, "-m", "milesbatch.tracking"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def artefacts(layout: RunLayout) -> dict[str, Path]:
    return {path.name: path for path in layout.tracking.glob("artifacts/*/artifacts/*")}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunLayout]:
    """Runs of which a report was asked for; none is made."""
    found: list[RunLayout] = []
    monkeypatch.setattr(following, "attach_report", found.append)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    return found


def test_page_and_samples_are_in_the_one_mlflow_run(tmp_path: Path) -> None:
    """Of a finished run, and again when it was given one more step; its name means something in a URI."""
    layout = tracked(tmp_path / "run?of#100%25")
    before = {path for path in layout.root.rglob("*") if layout.tracking not in path.parents}
    assert "the report is in the MLflow run" in track(layout)
    files = artefacts(layout)
    assert files.keys() == {"recipe.yaml", "report.html", "samples.jsonl"}
    page = files["report.html"].read_text()
    assert "finished" in page and "still going on" not in page and "0.125 → 0.250" in page
    samples = [json.loads(line) for line in files["samples.jsonl"].read_text().splitlines()]
    assert [sample["kind"] for sample in samples][:2] == ["best", "median"]
    assert samples[0]["messages"][1] == {"role": "assistant", "content": "2", "tool_calls": None}
    after = {path for path in layout.root.rglob("*") if layout.tracking not in path.parents}
    assert after == before | {layout.tracking}

    past_incarnation(layout)
    trained = {"step": 3, "replayed": False, "weights_digest": "", "metrics": {"reward_mean": 0.9}}
    EventLog(layout, "trainer-0", 2).write("train_step", **trained)
    EventLog(layout, "controller-0", 2).write("finished", step=3)
    track(layout, incarnation=2)
    assert "0.900" in artefacts(layout)["report.html"].read_text()
    with contextlib.closing(sqlite3.connect(layout.tracking / "mlflow.db")) as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        steps = store.execute("select step from metrics where key = 'reward_mean' order by step").fetchall()
        assert steps == [(1,), (2,), (3,)]
        number = "select value from tags where key = 'milesbatch.incarnation'"
        assert store.execute(number).fetchone() == ("2",)


@pytest.mark.long
def test_a_failed_run_gets_one_too_after_all_steps_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[RunLayout]
) -> None:
    layout = tracked(tmp_path / "run", ending="failed")
    seen: list[tuple[str, list[int]]] = []

    def look(which: RunLayout) -> None:
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'store.db'}")
        run = client.get_run(MlflowRun(which).run_id)
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "reward_mean")]
        seen.append((run.info.status, steps))

    monkeypatch.setattr(following, "attach_report", look)
    following.main(context(layout, 1))
    assert seen == [("FAILED", [1, 2])]


@pytest.mark.parametrize(("ending", "tracking"), [("stopped", {}), ("finished", {"report": False})])
def test_a_run_that_goes_on_later_or_does_not_want_it_gets_none(
    tmp_path: Path, made: list[RunLayout], ending: str, tracking: dict[str, Any]
) -> None:
    following.main(context(tracked(tmp_path / "run", ending=ending, **tracking), 1))
    assert made == []


def test_only_mlflow_keeps_files() -> None:
    assert wants_report(Tracking()) and wants_report(Tracking(kind="mlflow"))
    assert not any(wants_report(Tracking(kind=kind)) for kind in ("none", "tensorboard", "wandb"))


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def test_a_report_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(last_report, "LIMIT_S", 0.2)
    layout = tracked(tmp_path / "run")
    began_s = time.monotonic()
    attach_report(layout)
    assert time.monotonic() - began_s < 5
    said = capfd.readouterr().out
    assert "no report in the MLflow run: it was not done after 0 s" in said and "--track` does it by hand" in said


def test_a_server_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = tracked(tmp_path / "run")
    layout.tracking.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    attach_report(layout)
    assert "no report in the MLflow run: the MLflow store http://127.0.0.1:9 cannot be used" in capfd.readouterr().out


@pytest.mark.long
def test_a_run_without_tracking_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attach_report(tracked(tmp_path / "run"))
    assert "no report in the MLflow run: [Errno 2] No such file or directory" in capfd.readouterr().out


def test_a_process_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent.py").write_text("import sys; sys.exit(7)")
    (tmp_path / "loud.py").write_text("import sys; sys.exit('error: too little of everything\\n')")
    (tmp_path / "fine.py").write_text("print('done')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_limited("silent", [], 30) == "it ended with exit status 7"
    assert run_limited("loud", [], 30) == "too little of everything"
    assert run_limited("fine", [], 30) is None


def test_it_dies_with_the_tracking_process(tmp_path: Path) -> None:
    """The controller ends the tracking process by SIGKILL: what makes the report ends too."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import sys, time; from milesbatch.report.page import attach; attach.attach = lambda _: time.sleep(60); "
        'print(1, flush=True); attach.main([sys.argv[1], sys.argv[2]])\', sys.argv[1], str(__import__("os").getpid())],'
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "time.sleep(0.5)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.05)
