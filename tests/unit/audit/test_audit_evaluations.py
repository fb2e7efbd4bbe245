"""Evaluations are proven like all that was committed, and counted as no group of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import evaluate_version, flip, make_settings, quarantined

from milesbatch.audit.prove import audit_run, examine
from milesbatch.audit.repair import repair
from milesbatch.evaluation.reader import read_evaluations, record_paths
from milesbatch.records import EvaluationRecord, digest_bytes
from milesbatch.store.layout import RunLayout


def payload(layout: RunLayout, record: EvaluationRecord) -> Path:
    return layout.evaluation(record.version) / record.files[0].path


def test_whole_ones_are_sound_and_change_no_count(layout: RunLayout) -> None:
    before = audit_run(layout).to_json()
    evaluate_version(layout, 2)
    record = evaluate_version(layout, 4, (0.5, 0.25))
    after = audit_run(layout).to_json()
    assert after["ok"] and after["notes"] == before["notes"]
    assert (before["evaluations"], after["evaluations"]) == (0, 2)
    unchanged = ("groups", "trajectories", "versions", "rejected", "steps")
    assert {key: after[key] for key in unchanged} == {key: before[key] for key in unchanged}
    assert after["checked"]["files"] == before["checked"]["files"] + 4
    assert record.figures.reward_mean == 0.375


Damage = Callable[[RunLayout, EvaluationRecord], Path]


def _flip_record(layout: RunLayout, record: EvaluationRecord) -> Path:
    flip(layout.evaluation_record(record.version, record.tag), 60)
    return layout.evaluation_record(record.version, record.tag)


def _flip_file(layout: RunLayout, record: EvaluationRecord) -> Path:
    flip(payload(layout, record), 200)
    return payload(layout, record)


def _lose_file(layout: RunLayout, record: EvaluationRecord) -> Path:
    payload(layout, record).unlink()
    return payload(layout, record)


def _change_figures(layout: RunLayout, record: EvaluationRecord) -> Path:
    path = layout.evaluation_record(record.version, record.tag)
    better = record.model_copy(update={"figures": record.figures.model_copy(update={"reward_mean": 1.0})})
    path.write_bytes(better.to_bytes())
    return path


def _move_record(layout: RunLayout, record: EvaluationRecord) -> Path:
    path = layout.evaluation_record(record.version, "0" * 16)
    layout.evaluation_record(record.version, record.tag).rename(path)
    return path


def _name_fewer_prompts(layout: RunLayout, record: EvaluationRecord) -> Path:
    changed = record.model_copy(update={"settings": make_settings(1)})
    path = layout.evaluation_record(record.version, changed.tag)
    layout.evaluation_record(record.version, record.tag).unlink()
    path.write_bytes(changed.to_bytes())
    return path


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_flip_record, "damaged"),
        (_flip_file, "damaged"),
        (_lose_file, "missing"),
        (_change_figures, "mismatch"),
        (_move_record, "mismatch"),
        (_name_fewer_prompts, "mismatch"),
    ],
)
def test_damage_is_named_and_a_repair_makes_room_for_another(layout: RunLayout, damage: Damage, kind: str) -> None:
    record = evaluate_version(layout, 2)
    path = damage(layout, record)
    verdict, findings = examine(layout)
    assert [(found.kind, found.path) for found in verdict.violations] == [(kind, str(path.relative_to(layout.root)))]
    assert verdict.evaluations == 0 and verdict.groups.lost == 0
    repair(layout, findings)
    assert any(name.startswith("000002.") for name in quarantined(layout))
    assert audit_run(layout).ok
    again = evaluate_version(layout, 2)
    assert read_evaluations(layout)[0] == [again] and audit_run(layout).ok


def notes(layout: RunLayout) -> dict[str, str]:
    verdict = audit_run(layout)
    assert verdict.violations == ()
    return {note.path: note.kind for note in verdict.notes if note.path.startswith("evaluations/")}


def test_what_no_promise_depends_on_is_a_note(layout: RunLayout) -> None:
    gone = evaluate_version(layout, 9, weights_digest=digest_bytes(b"nine"))
    other = evaluate_version(layout, 2, weights_digest=digest_bytes(b"another two"))
    left = evaluate_version(layout, 4)
    layout.evaluation_record(4, left.tag).unlink()
    (layout.evaluation(4) / "mine.txt").write_text("")
    (layout.evaluation(4) / ".tmp-1").write_text("")
    assert notes(layout) == {
        f"evaluations/000009/{gone.tag}.json": "orphan",
        f"evaluations/000002/{other.tag}.json": "orphan",
        f"evaluations/000004/{left.files[0].path}": "leftover",
        "evaluations/000004/mine.txt": "stranger",
        "evaluations/000004/.tmp-1": "leftover",
    }
    assert record_paths(layout, 4) == [], "an audit changes nothing"


def test_tokens_of_another_version_are_found(layout: RunLayout) -> None:
    record = evaluate_version(layout, 2)
    moved = layout.evaluation(4)
    moved.mkdir(parents=True)
    (moved / record.files[0].path).write_bytes(payload(layout, record).read_bytes())
    lie = record.model_copy(update={"version": 4})
    layout.evaluation_record(4, lie.tag).write_bytes(lie.to_bytes())
    (found,) = audit_run(layout).violations
    assert found.kind == "mismatch" and "not of policy version 4" in found.detail
