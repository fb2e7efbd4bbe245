"""``audit --repair`` moves what is broken, says what the next start does, and is right about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_runs import STEPS, edit, generate, live, trained_file
from builders import flip, past_incarnation, quarantined

from milesbatch.audit.prove import audit_run, examine
from milesbatch.audit.repair import Repair, repair
from milesbatch.decisions.resume import plan_resume
from milesbatch.errors import FencedError, RunHeldError
from milesbatch.store import durable
from milesbatch.store.durable import remove_tree
from milesbatch.store.layout import RunLayout
from milesbatch.store.takeover import Claimant, take_over


def repaired(layout: RunLayout) -> Repair:
    return repair(layout, examine(layout)[1])


def unfinished(layout: RunLayout) -> RunLayout:
    """Killed before the last checkpoint was committed."""
    remove_tree(layout.checkpoint(STEPS))
    return layout


def test_nothing_is_moved_in_a_sound_run(layout: RunLayout) -> None:
    done = repaired(layout)
    assert done.moved == ()
    assert done.next_start == (f"will do nothing: the run is finished (checkpoint {STEPS} of {STEPS} steps is there)",)
    assert not any(layout.quarantine.iterdir())


def test_a_damaged_checkpoint_goes_and_the_one_before_serves(layout: RunLayout) -> None:
    flip(next(layout.checkpoint(STEPS).rglob("model.distcp")))
    done = repaired(layout)
    assert [path for path, _ in done.moved] == [f"checkpoints/{STEPS:06d}"]
    assert done.next_start == (f"will replay steps 5..{STEPS} from checkpoint 4",)
    found = take_over(layout, Claimant(), {}).found
    assert list(plan_resume(found.checkpoints, len(found.batches), found.last_version).replayed) == [5, 6]
    assert audit_run(layout).ok


def test_damaged_weights_are_published_again(layout: RunLayout) -> None:
    payload = next(layout.weights_version(STEPS).glob("keyframe*"))
    flip(payload)
    remove_tree(layout.checkpoint(STEPS))
    done = repaired(layout)
    assert f"weights/{STEPS:06d}/{payload.name}" in [path for path, _ in done.moved]
    assert done.next_start[:2] == (
        f"will replay steps 5..{STEPS} from checkpoint 4",
        f"will publish policy versions {STEPS} again",
    )
    assert take_over(layout, Claimant(), {}).found.last_version == STEPS - 1
    assert audit_run(layout).ok


def test_a_damaged_waiting_file_is_generated_again(layout: RunLayout) -> None:
    refs = generate(unfinished(layout), range(24, 26), version=5, incarnation=2)
    flip(layout.trajectory(refs[0].path))
    done = repaired(layout)
    assert f"trajectories/{refs[0].path}" in [path for path, _ in done.moved]
    assert done.next_start[-1] == "will generate groups 24..25 again"
    assert audit_run(layout).ok
    assert take_over(layout, Claimant(), {}).found.ready_files == []


def test_a_damaged_batch_record_drops_what_follows(layout: RunLayout) -> None:
    flip(layout.batch(5))
    remove_tree(layout.checkpoint(STEPS))
    done = repaired(layout)
    assert "batches/000005.json" in [path for path, _ in done.moved]
    assert done.next_start[0] == "will go on from checkpoint 4 with step 5"
    assert "will decide 1 recorded steps again, from step 5 on" in done.next_start
    assert len(take_over(layout, Claimant(), {}).found.batches) == 4
    assert audit_run(layout).ok


def test_a_trajectory_that_a_replay_needs(layout: RunLayout) -> None:
    path = trained_file(unfinished(layout), 5)
    flip(path)
    done = repaired(layout)
    assert done.next_start[0].startswith("cannot be continued: step 5 must be replayed, but ")
    assert path.name in done.next_start[0]


def test_a_damaged_trajectory_that_no_replay_needs(layout: RunLayout) -> None:
    path = trained_file(unfinished(layout), 2)
    flip(path)
    done = repaired(layout)
    assert not path.exists()
    assert done.next_start[0] == f"will replay steps 5..{STEPS} from checkpoint 4"
    assert not audit_run(layout).ok  # what step 2 was trained on can never be proven again


@pytest.mark.parametrize("file", ["run.json", "recipe.yaml", "model/config.json", "incarnations/000001.json"])
def test_what_nothing_can_go_around(layout: RunLayout, file: str) -> None:
    flip(layout.root / file)
    flip(layout.batch(2))
    done = repaired(layout)
    assert done.moved == ()
    assert done.next_start == (f"cannot be continued: {file} must be put back from a copy; nothing was moved",)
    assert (layout.root / file).exists()


def test_orphans_and_zombies_are_moved(layout: RunLayout) -> None:
    live(layout, [], STEPS)
    again = generate(layout, range(0, 2), version=0, incarnation=3)
    late = generate(layout, range(24, 26), version=5, incarnation=2)
    assert {path for path, _ in repaired(layout).moved} == {
        f"trajectories/{again[0].path}",
        f"trajectories/{late[0].path}",
    }
    assert len(quarantined(layout)) == 2
    verdict = audit_run(layout)
    assert (verdict.ok, verdict.notes) == (True, ())


def test_a_living_controller_is_not_disturbed(layout: RunLayout) -> None:
    flip(layout.batch(2))
    take_over(layout, Claimant(), {})  # by this process, which lives
    _, findings = examine(layout)
    with pytest.raises(RunHeldError, match="incarnation 3"):
        repair(layout, findings)
    assert (
        not [name for name in quarantined(layout) if name.startswith("batches.000002")] or not layout.batch(2).exists()
    )


def test_a_controller_that_starts_meanwhile_ends_the_repair(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(layout, range(0, 2), version=0, incarnation=2)
    generate(layout, range(2, 4), version=0, incarnation=2)
    moves: list[Path] = []

    def move_and_start(path: Path, quarantine: Path, reason: str) -> Path:
        moves.append(path)
        past_incarnation(layout)
        return path

    monkeypatch.setattr("milesbatch.audit.repair.move_to_quarantine", move_and_start)
    with pytest.raises(FencedError):
        repaired(layout)
    assert len(moves) == 1
    assert durable.move_to_quarantine is not move_and_start


def test_more_steps_make_a_finished_run_unfinished(layout: RunLayout) -> None:
    edit(layout.incarnation(2), lambda body: body.update(recipe_changes={"steps": 9}))
    assert repaired(layout).next_start == (f"will go on from checkpoint {STEPS} with step {STEPS + 1}",)
