"""Files of unfinished episodes break no promise: an audit proves them, and notes what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import flip, quarantined, save_unfinished

from milesbatch.audit.prove import audit_run, examine
from milesbatch.audit.repair import repair
from milesbatch.store.layout import RunLayout
from milesbatch.store.unfinished import saved_blocks


def notes(layout: RunLayout) -> dict[str, tuple[str, str]]:
    verdict = audit_run(layout)
    assert verdict.violations == ()
    return {note.path: (note.kind, note.detail) for note in verdict.notes}


def test_a_whole_file_is_sound_and_counts_no_trajectory(relaxed: RunLayout) -> None:
    before = audit_run(relaxed)
    path = relaxed.unfinished(save_unfinished(relaxed, range(100, 104)))
    after = audit_run(relaxed)
    assert after.notes == before.notes and after.ok
    assert after.to_json()["groups"] == before.to_json()["groups"]
    assert after.to_json()["trajectories"] == before.to_json()["trajectories"]
    checked = [verdict.to_json()["checked"] for verdict in (before, after)]
    assert checked[1] == {"files": checked[0]["files"] + 1, "bytes": checked[0]["bytes"] + path.stat().st_size}


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_one_is_noted_and_repaired(relaxed: RunLayout, damage: str) -> None:
    name = save_unfinished(relaxed, range(100, 104))
    path = relaxed.unfinished(name)
    if damage == "flipped":
        flip(path, 100)
    else:
        path.write_bytes(path.read_bytes()[: 50 if damage == "cut" else 0])
    kind, detail = notes(relaxed)[f"inflight/{name}"]
    assert kind == "leftover" and "is damaged" in detail and "generated from the start" in detail
    repair(relaxed, examine(relaxed)[1])
    assert saved_blocks(relaxed) == []
    assert [text for key, text in quarantined(relaxed).items() if key.startswith("inflight.")]


def test_one_that_nobody_needs_any_more_is_noted(relaxed: RunLayout) -> None:
    name = save_unfinished(relaxed, range(4))
    assert notes(relaxed)[f"inflight/{name}"][0] == "leftover"
    assert saved_blocks(relaxed) == [name], "an audit changes nothing"


def test_strangers_are_named(relaxed: RunLayout) -> None:
    (relaxed.inflight / "mine.txt").write_text("")
    (relaxed.inflight / ".tmp-1").write_text("")
    found = notes(relaxed)
    assert found["inflight/mine.txt"][0] == "stranger"
    assert found["inflight/.tmp-1"][0] == "leftover"


def test_trajectories_in_the_wrong_folder_are_no_unfinished_episodes(relaxed: RunLayout) -> None:
    some: Path = min(relaxed.trajectories.iterdir())
    (relaxed.inflight / some.name).write_bytes(some.read_bytes())
    kind, detail = notes(relaxed)[f"inflight/{some.name}"]
    assert kind == "leftover" and "not a file of unfinished episodes" in detail
