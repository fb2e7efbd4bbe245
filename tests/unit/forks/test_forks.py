"""Forks: what is taken over, that the parent stays as it is, refusals, kills, damage, and what an audit proves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from audit_runs import edit, read, sound_run
from builders import GROUPS_PER_STEP, make_run, past_incarnation
from forked_runs import (
    Full,
    KilledError,
    Mortal,
    WithoutLinks,
    begin_run,
    fork_recipe,
    grow_fork,
    make_fork,
    spoil,
    tree,
)

from milesbatch.audit.findings import Findings
from milesbatch.audit.prove import audit_run, examine
from milesbatch.audit.repair import describe_next_start, repair
from milesbatch.audit.rules import check_identity
from milesbatch.decisions.resume import plan_resume
from milesbatch.errors import (
    CorruptArtefactError,
    InputError,
    MilesbatchError,
    RunMismatchError,
    StorageFullError,
)
from milesbatch.forks import make as making
from milesbatch.records import Retirement, RunRecord, WeightsManifest
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import file_ref, verify_files
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.store.run import read_fork
from milesbatch.store.survey import read_incarnations, survey


@pytest.fixture
def parent(original: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy to be damaged."""
    return RunLayout(Path(shutil.copytree(original.root, tmp_path / "old")))


def new(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "new")


def assert_sound(layout: RunLayout) -> None:
    verdict = audit_run(layout)
    assert verdict.violations == ()


# -- what is taken over --------------------------------------------------------------------------------------------------


def test_it_begins_with_the_newest_checkpoint_and_the_versions_that_make_the_next_groups(
    original: RunLayout, tmp_path: Path
) -> None:
    before = tree(original.root)
    told = make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    assert (told.step, told.policy_version, told.first_group, told.decided) == (6, 6, 6 * GROUPS_PER_STEP, ())
    # Staleness 1: groups of step 7 are made by version 5, whose chain begins with the keyframe of version 3.
    assert told.first_version == 3
    assert sorted(path.name for path in fork.weights.iterdir()) == ["000003", "000004", "000005", "000006"]
    ours, theirs = (read(WeightsManifest, layout.weights_manifest(6)) for layout in (fork, original))
    assert ours.weights_digest == theirs.weights_digest == told.weights_digest
    assert ours.incarnation == 0
    assert (fork.checkpoint_shards(6, 0) / "model.distcp").read_bytes() == b"state 6" * 50
    for path in original.model.iterdir():
        assert (fork.model / path.name).read_bytes() == path.read_bytes()
    assert not any(layout.exists() for layout in (fork.batches, fork.trajectories, fork.incarnations, fork.run_record))
    assert tree(original.root) == before
    assert_sound(original)


def test_the_run_made_of_it_says_whose_state_it_is_and_the_audit_proves_that_without_the_parent(
    parent: RunLayout, tmp_path: Path
) -> None:
    told = make_fork(parent, tmp_path / "new")
    fork = new(tmp_path)
    record = begin_run(fork)
    assert record.forked_from == told and record.run_id != told.run_id
    assert told.run_id == read(RunRecord, parent.run_record).run_id
    grow_fork(fork, range(7, 9))
    shutil.rmtree(parent.root)
    verdict = audit_run(fork)
    assert verdict.violations == ()
    assert (verdict.steps, verdict.first_version, verdict.last_version, verdict.checkpoints) == (8, 3, 8, (6, 8))
    assert (verdict.groups.trained, verdict.groups.pending, verdict.groups.lost) == (8, 0, 0)
    assert not [note for note in verdict.notes if note.kind != "leftover"], verdict.notes


def test_a_chosen_checkpoint_and_a_fork_of_a_fork(parent: RunLayout, tmp_path: Path) -> None:
    assert make_fork(parent, tmp_path / "new", step=4).step == 4
    fork = new(tmp_path)
    begin_run(fork)
    grow_fork(fork, range(5, 8))
    shutil.rmtree(parent.root)
    second = make_fork(fork, tmp_path / "second")
    assert (second.step, second.first_group, second.run_id) == (7, 28, read(RunRecord, fork.run_record).run_id)
    again = RunLayout(tmp_path / "second")
    begin_run(again)
    grow_fork(again, range(8, 10))
    assert_sound(again)
    third = make_fork(fork, tmp_path / "third", step=4)
    assert (third.step, third.first_version) == (4, 3), "its own origin is a checkpoint like another"


def test_without_a_checkpoint_it_begins_with_the_starting_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    told = make_fork(run, tmp_path / "new")
    assert (told.step, told.checkpoint_digest, told.weights_digest, told.first_group) == (0, None, None, 0)
    fork = new(tmp_path)
    begin_run(fork)
    assert_sound(fork)
    found = survey(fork, [])
    assert (found.last_batch, found.last_version, found.checkpoints) == (0, -1, [])


def test_groups_that_a_relaxed_parent_decided_out_of_order_are_not_made_again(tmp_path: Path) -> None:
    parent = sound_run(tmp_path / "old", "relaxed", steps=4)

    def swapped(body: dict[str, Any]) -> None:
        """Group 13 waits, and group 17 was trained in its place."""
        for group in body["trained"]:
            group["group_id"] = 17 if group["group_id"] == 13 else group["group_id"]
        body["stream_position"] = 18

    edit(parent.batch(4), swapped)
    told = make_fork(parent, tmp_path / "new", determinism="relaxed")
    assert (told.first_group, told.decided) == (13, (14, 15, 17))
    fork = new(tmp_path)
    begin_run(fork, determinism="relaxed")
    fates = survey(fork, []).fates
    assert [group for group in range(12, 20) if fates.is_pending(group)] == [13, 16, 18, 19]
    assert fates.stream_position == 18
    with pytest.raises(RunMismatchError, match="determinism is bitwise"):
        make_fork(parent, tmp_path / "fixed")


def test_versions_that_the_parent_has_retired_are_done_without_and_that_is_said(
    parent: RunLayout, tmp_path: Path
) -> None:
    for version in range(6):
        retired = Retirement(version=version, incarnation=2, base=6, needed=6, checkpoint=8, staleness=1, created_at="")
        parent.weights_retirement(version).write_bytes(retired.to_bytes())
    said: list[str] = []
    told = make_fork(parent, tmp_path / "new", said=said)
    assert told.first_version == 6
    assert "retired the policy versions before 6" in said[-1]
    with pytest.raises(RunMismatchError, match=r"policy version 4 of .* was retired"):
        make_fork(parent, tmp_path / "other", step=4)


# -- going on with it ----------------------------------------------------------------------------------------------------


def test_the_same_command_again_finds_what_was_made(parent: RunLayout, tmp_path: Path) -> None:
    told = make_fork(parent, tmp_path / "new")
    shutil.rmtree(parent.checkpoint(6))  # the parent has gone on
    assert make_fork(parent, tmp_path / "new") == told
    begin_run(new(tmp_path))
    assert make_fork(parent, tmp_path / "new") == told
    assert make_fork(parent, tmp_path / "new", step=6) == told
    with pytest.raises(RunMismatchError, match="behind step 6, not 4"):
        make_fork(parent, tmp_path / "new", step=4)


def test_the_first_take_over_seals_what_was_given(original: RunLayout, tmp_path: Path) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    past_incarnation(fork)
    (incarnation,) = read_incarnations(fork)
    assert (incarnation.seal.last_batch, incarnation.seal.last_version, incarnation.seal.checkpoints) == (6, 6, (6,))
    found = survey(fork, [incarnation])
    assert not found.broken and not found.unseen
    plan = plan_resume(found.checkpoints, found.last_batch, found.last_version, found.origin.step)
    assert (plan.checkpoint_step, plan.from_checkpoint, list(plan.replayed)) == (6, True, [])


def test_a_damaged_version_of_the_first_step_is_published_again_and_a_lost_checkpoint_is_said(
    original: RunLayout, tmp_path: Path
) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    (keyframe,) = fork.weights_version(6).glob("keyframe.*")
    spoil(keyframe)
    found = survey(fork, [])
    assert found.last_version == 5, "versions 3 to 5 are whole"
    plan = plan_resume(found.checkpoints, found.last_batch, found.last_version, found.origin.step)
    assert (plan.checkpoint_step, plan.is_published) == (6, False)
    spoil(fork.checkpoint_shards(6, 0) / "model.distcp")
    found = survey(fork, [])
    with pytest.raises(CorruptArtefactError, match="checkpoint 6, with which this fork began"):
        plan_resume(found.checkpoints, found.last_batch, found.last_version, found.origin.step)


def test_the_checkpoint_that_a_fork_began_with_is_never_retired(original: RunLayout, tmp_path: Path) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    for step in range(7, 12):
        grow_fork(fork, range(step, step + 1))
    assert sorted(path.parent.name for path in fork.checkpoints.glob("*/manifest.json")) == [
        "000006",
        "000010",
        "000011",
    ]
    assert_sound(fork)


# -- what an audit finds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["weights", "shards", "checkpoint gone", "parent's record", "run id", "model", "fate"])
def test_an_audit_finds_a_first_state_that_is_not_the_parents(original: RunLayout, tmp_path: Path, what: str) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    grow_fork(fork, range(7, 8))
    assert_sound(fork)
    if what == "weights":
        edit(fork.weights_manifest(6), lambda body: body.update(weights_digest="xxh128:" + "0" * 32))
        wanted = "the fork began with the parent's"
    elif what == "shards":
        shard = fork.checkpoint_shards(6, 0) / "model.distcp"
        shard.unlink()
        shard.write_bytes(b"another state")
        edit(fork.checkpoint_manifest(6), lambda body: body.update(files=[_ref(ref, shard) for ref in body["files"]]))
        wanted = "its shards are not those of the parent's checkpoint"
    elif what == "checkpoint gone":
        shutil.rmtree(fork.checkpoint(6))
        wanted = "it is never deleted"
    elif what == "parent's record":
        fork.parent_checkpoint.unlink()
        wanted = "parent/checkpoint.json is missing"
    elif what == "run id":
        edit(fork.run_record, lambda body: body["forked_from"].update(run_id="another"))
        wanted = "this run was forked from another"
    elif what == "model":
        edit(fork.run_record, lambda body: body["fingerprints"].update(tokenizer="xxh128:" + "0" * 32))
        wanted = "its tokenizer is"
    else:

        def again(body: dict[str, Any]) -> None:
            body["trained"][0]["group_id"] = 3

        edit(fork.batch(7), again)
        wanted = "group 3 had its fate before the run was forked"
    found = [violation.detail for violation in audit_run(fork).violations]
    assert any(wanted in detail for detail in found), found


def _ref(ref: dict[str, Any], shard: Path) -> dict[str, Any]:
    return file_ref(shard, ref["path"]).model_dump() if ref["path"].endswith(shard.name) else ref


def test_a_repair_says_what_a_fork_cannot_go_on_without(original: RunLayout, tmp_path: Path) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    grow_fork(fork, range(7, 8))
    verdict, findings = examine(fork)
    assert verdict.ok and describe_next_start(fork, read_incarnations(fork), findings) == [
        "will go on from checkpoint 7 with step 8"
    ]
    shutil.rmtree(fork.checkpoint(7))
    spoil(fork.checkpoint_shards(6, 0) / "model.distcp")
    (told,) = describe_next_start(fork, read_incarnations(fork), findings)
    assert told.startswith("cannot be continued: checkpoint 6, with which this fork began")
    spoil(fork.parent_weights)
    found = repair(fork, examine(fork)[1])
    assert found.moved == () and "parent/weights.json must be put back" in found.next_start[0]


def test_a_record_of_a_step_before_the_fork_is_a_violation(original: RunLayout, tmp_path: Path) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    begin_run(fork)
    grow_fork(fork, range(7, 8))
    shutil.copy(original.batch(3), fork.batch(3))
    assert [violation.path for violation in audit_run(fork).violations] == ["batches/000003.json"]


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 6}, "steps is 6, and the fork begins behind step 6"),
        ({"model": {"hidden_size": 256}}, r"model\.hidden_size: 128 -> 256"),
        ({"weights": {"dtype": "bfloat16"}}, r"weights\.dtype: .*float32.* -> 'bfloat16'"),
        (
            {"trainer": {"groups_per_step": 5}, "rollout": {"groups_per_lease": 5}},
            "groups_per_lease is 5, and the fork goes on with group 24",
        ),
    ],
)
def test_a_recipe_that_cannot_go_on_from_there_is_refused(
    original: RunLayout, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunMismatchError, match=said):
        make_fork(original, tmp_path / "new", **changes)
    assert not list(tmp_path.iterdir())


def test_other_settings_are_taken_over(original: RunLayout, tmp_path: Path) -> None:
    changes = {
        "trainer": {"groups_per_step": 6, "ranks": 2, "optimizer": {"learning_rate": 1e-6}},
        "rollout": {"samples_per_group": 3, "groups_per_lease": 2, "staleness": 2},
        "seed": 7,
    }
    told = make_fork(original, tmp_path / "new", **changes)
    assert told.first_version == 3, "staleness 2: version 4 makes the groups of step 7"
    begin_run(new(tmp_path), **changes)
    rule = audit_rules(new(tmp_path))
    assert (rule.groups_of_step(7), rule.version_for(24), rule.version_for(30)) == (range(24, 30), 4, 5)


def audit_rules(layout: RunLayout) -> Any:
    rules = check_identity(layout, Findings(layout.root)).rules
    assert rules is not None
    return rules.batching


def test_places_that_cannot_be_a_fork_are_refused(parent: RunLayout, tmp_path: Path) -> None:
    for place, said in (
        (parent.root, "the run that is forked itself"),
        (parent.root / "inside", "inside it"),
        (tmp_path, "above it"),
    ):
        with pytest.raises(InputError, match=said):
            make_fork(parent, place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    for place, said in ((tmp_path / "full", "is no fork"), (tmp_path / "file", "is a file")):
        with pytest.raises(InputError, match=said):
            make_fork(parent, place)
    other = make_run(tmp_path / "other")
    with pytest.raises(RunMismatchError, match="which is no fork"):
        make_fork(parent, other.root)
    make_fork(parent, tmp_path / "new")
    past_incarnation(other)
    with pytest.raises(RunMismatchError, match="it was forked from run"):
        make_fork(other, tmp_path / "new")
    with pytest.raises(InputError, match="is not a run"):
        make_fork(RunLayout(tmp_path / "nothing"), tmp_path / "another")
    with pytest.raises(InputError, match=r"no checkpoint of step 5 .*\n?.*give one of 0, 4, 6"):
        make_fork(parent, tmp_path / "another", step=5)
    (tmp_path / "empty").mkdir()
    assert make_fork(parent, tmp_path / "empty").step == 6


# -- damage, kills, full disks ---------------------------------------------------------------------------------------------


def test_of_a_damaged_parent_the_newest_whole_checkpoint_is_taken(parent: RunLayout, tmp_path: Path) -> None:
    (shard,) = parent.checkpoint(6).glob("shards.*/model.distcp")
    spoil(shard)
    assert make_fork(parent, tmp_path / "new").step == 4
    (shard,) = parent.checkpoint(4).glob("shards.*/optim.distcp")
    spoil(shard)
    with pytest.raises(InputError, match="no checkpoint of step 4"):
        make_fork(parent, tmp_path / "other", step=4)


@pytest.mark.parametrize("name", ["model/config.json", "recipe.yaml", "run.json", "incarnations/000002.json"])
def test_a_parent_whose_model_or_records_are_damaged_is_not_forked(
    parent: RunLayout, tmp_path: Path, name: str
) -> None:
    spoil(parent.root / name)
    with pytest.raises(CorruptArtefactError, match=Path(name).name):
        make_fork(parent, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_a_damaged_older_checkpoint_that_was_chosen_is_found_and_named(parent: RunLayout, tmp_path: Path) -> None:
    """The survey reads the newest one only."""
    (shard,) = parent.checkpoint(4).glob("shards.*/optim.distcp")
    spoil(shard)
    with pytest.raises(CorruptArtefactError, match=r"old/checkpoints/000004.*optim\.distcp is damaged"):
        make_fork(parent, tmp_path / "new", step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_a_checkpoint_that_the_parent_deletes_meanwhile_is_given_up_for_another(
    parent: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, tries = making.take_file, []

    def late(source: Path, ref: Any, target: Path) -> None:
        if "checkpoints/000006" in str(source) and not tries:
            tries.append(source)
            shutil.rmtree(parent.checkpoint(6))
        take(source, ref, target)

    monkeypatch.setattr(making, "take_file", late)
    assert make_fork(parent, tmp_path / "new").step == 4
    assert tries


def assert_whole_or_absent(layout: RunLayout) -> bool:
    if not layout.root.exists():
        return False
    record = read_fork(layout)
    assert record is not None
    verify_files(layout.root, record.files)
    return True


def test_killed_before_any_operation_there_is_no_fork_or_a_whole_one_and_the_same_command_goes_on(
    original: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, number, made = tree(original.root), 0, 0
    lives = iter(range(10_000))
    while True:
        target = tmp_path / f"{number}" / "new"
        life = f"life {next(lives)}"
        monkeypatch.setattr(making, "process_started", lambda pid="self", life=life: life if pid == "self" else None)
        try:
            with installed(Mortal(number)):
                make_fork(original, target, step=4)
            break
        except KilledError:
            pass
        is_made = assert_whole_or_absent(RunLayout(target))
        made += is_made
        if is_made or number % 6 == 0:
            make_fork(original, target)
            assert assert_whole_or_absent(RunLayout(target))
            assert [path.name for path in target.parent.iterdir()] == ["new"], "what the killed one left is gone"
        number += 1
    assert number > 60 and made >= 1
    assert tree(original.root) == before
    for path in original.holds.glob("*.json"):  # of the killed ones: nobody renews them
        path.unlink()
    assert_sound(original)


def test_what_a_living_maker_or_another_host_has_begun_is_left_alone(parent: RunLayout, tmp_path: Path) -> None:
    mine = tmp_path / f".new.fork-{making._maker()}-0123abcd"
    theirs = tmp_path / ".new.fork-node-7-12-89abcdef-0123abcd"
    for path in (mine, theirs):
        path.mkdir()
    said: list[str] = []
    make_fork(parent, tmp_path / "new", said=said)
    assert mine.exists() and theirs.exists()
    assert any("begun on node-7" in line for line in said)


def test_on_another_filesystem_files_are_copied(original: RunLayout, tmp_path: Path) -> None:
    with installed(WithoutLinks(original.root)):
        make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    assert assert_whole_or_absent(fork)
    assert (fork.checkpoint_shards(6, 0) / "model.distcp").stat().st_nlink == 1
    begin_run(fork)
    assert_sound(fork)


@pytest.mark.parametrize("operations", [WithoutLinks, Operations])
def test_on_a_full_disk_nothing_has_the_new_name_and_it_is_said(
    original: RunLayout, tmp_path: Path, operations: type[Operations]
) -> None:
    class FullAndSo(Full, operations):  # type: ignore[valid-type,misc]
        pass

    for after in (1, 5, 9):
        full = FullAndSo(after)
        full._source = original.root
        with installed(full), pytest.raises(StorageFullError, match="no space"):
            make_fork(original, tmp_path / "new")
        assert not list(tmp_path.iterdir())
    assert make_fork(original, tmp_path / "new").step == 6


def test_two_at_once_make_one(original: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = making._name

    def late(building: Path, target: Path) -> None:
        monkeypatch.setattr(making, "_name", name)
        make_fork(original, target)
        name(building, target)

    monkeypatch.setattr(making, "_name", late)
    with pytest.raises(MilesbatchError, match="another process"):
        make_fork(original, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert assert_whole_or_absent(new(tmp_path))


def test_a_fork_needs_the_models_of_its_parent_also_when_the_run_is_made(original: RunLayout, tmp_path: Path) -> None:
    make_fork(original, tmp_path / "new")
    fork = new(tmp_path)
    lay_out(fork, fork_recipe())
    parent = read(RunRecord, original.run_record)
    with pytest.raises(RunMismatchError, match="the tokenizer is"):
        commit_run(fork, fork_recipe(), {**parent.fingerprints, "tokenizer": "another"})
    assert not fork.run_record.exists()
