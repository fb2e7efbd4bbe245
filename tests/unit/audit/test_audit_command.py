"""``milesbatch audit``: exit codes, one JSON document, words that name the file; and the seconds by cause."""

from __future__ import annotations

import json
import sys

import pytest
from audit_runs import STEPS, live, trained_file
from builders import flip

from milesbatch.audit.prove import audit_run
from milesbatch.audit.times import CAUSES
from milesbatch.cli.main import main
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.takeover import Claimant, take_over


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["milesbatch", "audit", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_a_sound_run_exits_with_0(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, str(layout.root)) == 0
    out = capsys.readouterr().out
    assert f"groups: {4 * STEPS} trained, 0 rejected, 0 pending, 0 lost, 0 repeated" in out
    assert out.endswith("sound: no violation\n")


def test_the_json_document(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained_file(layout, 2)
    flip(path)
    assert call(monkeypatch, str(layout.root), "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False
    assert [(v["kind"], v["path"]) for v in body["violations"]] == [("damaged", f"trajectories/{path.name}")]
    assert path.name in body["violations"][0]["detail"]
    assert set(body) >= {"ok", "violations", "groups", "versions", "incarnations", "seconds"}
    assert set(body["groups"]) == {"trained", "rejected", "pending", "lost", "repeated"}
    assert body["groups"]["lost"] == 2
    assert set(body["seconds"]) == set(CAUSES)


def test_a_violation_is_named_on_the_screen(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(layout.batch(3))
    assert call(monkeypatch, str(layout.root)) == 1
    out = capsys.readouterr().out
    assert "VIOLATION damaged: batches/000003.json: " in out
    assert "not sound: " in out


def test_repair_on_the_command_line(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(layout.checkpoint_manifest(STEPS))
    assert call(monkeypatch, str(layout.root), "--repair", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert [move["path"] for move in body["repair"]["moved"]] == [f"checkpoints/{STEPS:06d}"]
    assert body["repair"]["next_start"] == [f"will replay steps 5..{STEPS} from checkpoint 4"]
    assert call(monkeypatch, str(layout.root), "--repair") == 0
    assert f"the next start will replay steps 5..{STEPS} from checkpoint 4" in capsys.readouterr().out


def test_repair_of_a_living_run_is_refused(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_over(layout, Claimant(), {})
    assert call(monkeypatch, str(layout.root), "--repair") == 75
    assert "is alive; nothing was moved" in capsys.readouterr().err


def test_no_run(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, str(tmp_path)) == 2


# -- seconds --------------------------------------------------------------------------------------------------------


def test_seconds_by_cause(layout: RunLayout) -> None:
    """Two lives: the builder's logs say 2 s until ready, and 0.5 s waiting and 1.25 s training for each step."""
    rollout = EventLog(layout, "rollout-0", 1)
    rollout.write("trajectories_committed", generated_s=1.5)
    rollout.write("trajectories_committed", generated_s=2.0)
    rollout.close()
    third = live(layout, [], STEPS)
    trainer = EventLog(layout, "trainer-0", third)
    metrics = {"wait_s": 0.25, "train_s": 3.0, "publish_s": 0.75}
    trainer.write("train_step", step=STEPS, replayed=True, metrics=metrics)
    trainer.write("checkpoint_started", step=STEPS, stall_s=0.125)
    trainer.close()
    verdict = audit_run(layout)
    # Between ready and the first step, loading counts as well; there the clock is a real one.
    assert verdict.seconds.pop("starting") >= 2.0
    assert verdict.seconds.pop("restarting") == pytest.approx(4.0, abs=0.5)
    assert verdict.seconds == {
        "generating": 3.5,
        "training": 1.25 * STEPS,
        "waiting": 0.5 * STEPS,
        "replaying": 4.0,
        "checkpointing": 0.125,
    }
    assert verdict.replayed == (STEPS,)


def test_logs_that_are_gone_or_torn_are_never_a_violation(layout: RunLayout) -> None:
    log = layout.event_log("trainer-0", 1)
    log.write_bytes(
        b'{"event": "train_step", "metrics": 7}\n[1]\n{"event": "ready", "seconds": "x"}\n\xff\n{"at": 1}\n{"ev'
    )
    layout.event_log("trainer-0", 2).unlink()
    layout.event_log("rollout-0", 1).mkdir()
    verdict = audit_run(layout)
    assert verdict.ok
    assert set(verdict.seconds.values()) == {0.0}
    for path in layout.events.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    layout.events.rmdir()
    assert audit_run(layout).ok
