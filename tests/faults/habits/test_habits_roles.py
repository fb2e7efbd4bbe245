"""Weights, checkpoints, trajectories and the audit on hosts that see late what others have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from builders import (
    GROUPS_PER_STEP,
    IMPATIENT,
    FileSaver,
    commit_batch,
    commit_checkpoint,
    grow,
    make_batch,
    make_facts,
    make_recipe,
    make_run,
    publish,
    quarantined,
    unfenced,
    write_groups,
)
from habits_life import STEPS, run_on_hosts
from seeded import QUIET, WAIT_S, Cases, on, patient, start
from shared_filesystem import SharedFilesystem

from milesbatch.audit.patience import examine_patiently, looks_after
from milesbatch.audit.prove import audit_run, examine
from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import GroupRef
from milesbatch.rollout.reaching import open_follower
from milesbatch.store.durable import AlreadyExistsError, remove_file
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.store.sight import Sight
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.trainer.batch import read_groups
from milesbatch.trainer.checkpointing import Checkpointer, read_checkpoint
from milesbatch.trainer.restoring import restore_groups
from milesbatch.weights.follower import Follower, VerifiedWeights
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import read_manifest

SEEDS = range(12)
VERSIONS = 7


def new_run(shared: SharedFilesystem) -> RunLayout:
    layout = make_run(on(shared, "head").root, make_recipe(steps=4))
    start(layout)
    shared.settle()
    return layout


def value_of(weights: VerifiedWeights) -> float:
    """What ``builders.publish`` wrote into the version."""
    return float(weights.tensors()["b"][0])


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_follower_that_is_told_before_it_can_see_waits() -> None:
    """It reaches exactly the version that it is told, every time, whatever it sees first; and never another's content."""
    cases, waited_s, hasty = Cases(), 0.0, 0

    def follow(shared: SharedFilesystem) -> None:
        nonlocal waited_s, hasty
        trainer = new_run(shared)
        follower = Follower(on(shared, "worker"), sight=patient())
        for version in range(VERSIONS):
            publish(trainer, [version])
            hasty += not is_reached(Follower(on(shared, "hasty")), version)
            began_s = shared.clock.now_s
            weights = follower.advance_to(version)
            waited_s = max(waited_s, shared.clock.now_s - began_s)
            assert (weights.version, value_of(weights)) == (version, float(version))
        late = Follower(on(shared, "late"), sight=patient()).advance_to(VERSIONS - 1)
        assert value_of(late) == VERSIONS - 1
        assert value_of(follower.advance_to(2)) == 2, "it can go back"

    cases.run(SEEDS, follow, **QUIET)
    assert 1.0 < waited_s < WAIT_S
    assert hasty > 50, "who does not wait gives up"


def is_reached(follower: Follower, version: int) -> bool:
    try:
        return follower.advance_to(version).version == version
    except (StorageError, CorruptArtefactError):
        return False


def test_a_version_that_never_appears_is_a_clear_error() -> None:
    def follow(shared: SharedFilesystem) -> None:
        publish(new_run(shared), [0, 1])
        shared.settle()
        told: list[str] = []
        follower = Follower(on(shared, "worker"), sight=Sight(20.0, told.append))
        follower.advance_to(1)
        began_s = shared.clock.now_s
        with pytest.raises(
            StorageError, match=r"version 2 is not published in .*/weights \(after 20 s of looking for it\)"
        ):
            follower.advance_to(2)
        assert 20 <= shared.clock.now_s - began_s < 26
        assert follower.current is not None and follower.current.version == 1
        assert told and "weights/000002/manifest.json is not (wholly) visible yet; looking for" in told[0]

    Cases().run(range(1), follow, **QUIET)


def test_damage_is_told_at_once() -> None:
    """Another byte at the right length is never a matter of patience."""

    def follow(shared: SharedFilesystem) -> None:
        publish(new_run(shared), [0])
        shared.settle()
        (payload,) = (on(shared, "truth").weights_version(0)).glob("*.safetensors")
        data = bytearray(payload.read_bytes())
        data[-1] ^= 1
        payload.write_bytes(bytes(data))
        shared.settle()
        began_s = shared.clock.now_s
        with pytest.raises(CorruptArtefactError, match="cannot be rebuilt"):
            Follower(on(shared, "worker"), sight=patient()).advance_to(0)
        assert shared.clock.now_s - began_s < 1.0

    Cases().run(range(2), follow, **QUIET)


@pytest.mark.long
def test_a_worker_never_uses_a_zombies_version() -> None:
    """The zombie's manifest was under that name once, and the worker's host remembers it."""
    cases, remembered = Cases(("nfs", "hostile")), 0

    def follow(shared: SharedFilesystem) -> None:
        nonlocal remembered
        layout = new_run(shared)
        publish(layout, [0, 1])
        refs = write_groups(layout, range(4))
        commit_batch(layout, 1, refs)
        shared.settle()
        second = start(on(shared, "second"))
        assert second.record.seal.last_version == 1
        zombie = publish(layout, [2])[0]
        worker = on(shared, "worker")
        patient().until_seen(lambda: _must_be_there(worker, 2))
        accept = Seals(read_incarnations(on(shared, "second"), at_least=2)).accept_weights
        trainer = Publisher(
            on(shared, "second"), 2, keyframe_every=3, before_commit=unfenced, accept=accept, sight=patient()
        )
        trainer.seed(1)
        weights = [("w", torch.full((8,), 22.0)), ("b", torch.tensor([22.0]))]
        try:
            mine = trainer.publish(2, weights, {})
        except AlreadyExistsError:  # it did not see the zombie's; the supervisor starts it again
            mine = trainer.publish(2, weights, {})
        assert mine.weights_digest != zombie.weights_digest
        remembered += read_manifest(worker, 2) == zombie
        follower = open_follower(open_run(worker, 2, patient()), 2, lambda text: None)
        assert value_of(follower.advance_to(2)) == 22.0

    cases.run(range(20), follow, **QUIET)
    assert remembered > 5


def test_a_replay_elsewhere_leaves_sound_versions_alone() -> None:
    """A trainer on another host sees manifests before their payload; it compares, and publishes nothing again."""
    cases, hasty = Cases(("lustre", "beegfs", "hostile")), 0

    def replay(shared: SharedFilesystem) -> None:
        nonlocal hasty
        manifests = publish(new_run(shared), range(VERSIONS))
        shared.clock.sleep(0.5)
        elsewhere = on(shared, "elsewhere")
        publisher = Publisher(elsewhere, 1, keyframe_every=3, before_commit=unfenced, sight=patient())
        for version, manifest in enumerate(manifests):
            hasty += not is_reached(Follower(on(shared, "hasty")), version)
            patient().until_seen(lambda version=version: _must_be_there(elsewhere, version))
            assert publisher.publish(version, tensors_of(version), {}) == manifest
        assert quarantined(on(shared, "truth")) == {}

    cases.run(SEEDS, replay, **QUIET)
    assert hasty > 10


def tensors_of(version: int) -> list[tuple[str, Any]]:
    weight = torch.arange(256, dtype=torch.float32)
    weight[: version + 1] += version
    return [("w", weight), ("b", torch.tensor([float(version)]))]


def _must_be_there(layout: RunLayout, version: int) -> None:
    """The survey has seen the manifest, or the trainer would not replay up to it."""
    if read_manifest(layout, version) is None:
        raise CorruptArtefactError("not seen", unseen=layout.weights_manifest(version))


# -- checkpoints ----------------------------------------------------------------------------------------------------


def checkpointer(layout: RunLayout) -> Checkpointer:
    return Checkpointer(layout, Fence(layout, 1), FileSaver(), 0, 1, 100, IMPATIENT)


def test_a_checkpoint_is_read_elsewhere() -> None:
    cases, hasty = Cases(), 0

    def read(shared: SharedFilesystem) -> None:
        nonlocal hasty
        layout = new_run(shared)
        with mock.patch.object(FileSaver, "load", lambda *args: None, create=True):
            for step in (2, 4):
                manifest = commit_checkpoint(layout, step)
                try:
                    checkpointer(on(shared, "hasty")).restore(step, {})
                except (CorruptArtefactError, StorageError):
                    hasty += 1
                assert checkpointer(on(shared, "elsewhere")).restore(step, {}, patient()) == manifest

    cases.run(SEEDS, read, **QUIET)
    assert hasty > 20


def test_a_trainer_elsewhere_does_not_write_a_committed_checkpoint_again() -> None:
    """It would begin by removing the shards of the committed one."""
    cases, blind = Cases(("nfs",)), 0

    def again(shared: SharedFilesystem) -> None:
        nonlocal blind
        layout, elsewhere = new_run(shared), on(shared, "elsewhere")
        elsewhere.checkpoint_manifest(2).exists()
        commit_checkpoint(layout, 2)
        (elsewhere.checkpoint(2) / "x").exists()
        blind += not elsewhere.checkpoint_manifest(2).exists()
        assert checkpointer(elsewhere).has(2, patient())

    cases.run(range(20), again, **QUIET)
    assert blind > 5


def test_shards_do_not_name_what_was_deleted() -> None:
    """An attempt that died left an open file behind, which NFS keeps for a while in the directory of the shards."""

    def commit(shared: SharedFilesystem) -> None:
        layout = new_run(shared)
        first = checkpointer(layout)
        first.prepare(2)
        (layout.checkpoint_shards(2, 1) / "model.distcp").write_bytes(b"half")
        again = checkpointer(layout)
        again.prepare(2)
        assert any(path.name.startswith(".nfs") for path in layout.checkpoint_shards(2, 1).iterdir())
        again.start({"model.distcp": b"whole"}, make_facts(2))
        again.finish()
        shared.settle()
        files = checkpointer_files(on(shared, "elsewhere"))
        assert files == ["shards.i000001/model.distcp"]

    Cases(("nfs",)).run(range(5), commit, **{**QUIET, "silly_names": 1.0})


def checkpointer_files(layout: RunLayout) -> list[str]:
    return [ref.path for ref in read_checkpoint(layout, 2).files]


# -- trajectories ---------------------------------------------------------------------------------------------------


def test_a_trainer_that_is_told_of_a_file_waits_for_it() -> None:
    """Worker, controller and trainer on three hosts: the groups that are trained on are those that were written."""
    cases, hasty = Cases(), 0

    def train(shared: SharedFilesystem) -> None:
        nonlocal hasty
        new_run(shared)
        for block in range(0, 8, 2):
            refs = write_groups(on(shared, "worker"), [block, block + 1])
            hasty += not is_read(on(shared, "hasty"), refs)
            groups = read_groups(on(shared, "trainer"), refs, patient())
            assert sorted(groups) == [block, block + 1]
            assert [t.tokens for t in groups[block]] == [(5, 6, 7, 8, 9), (5, 6, 8, 8, 9)]

    cases.run(SEEDS, train, **QUIET)
    assert hasty > 50


def is_read(layout: RunLayout, refs: tuple[GroupRef, ...]) -> bool:
    try:
        return bool(read_groups(layout, refs))
    except CorruptArtefactError:
        return False


def test_a_file_that_never_appears_is_a_clear_error() -> None:
    def train(shared: SharedFilesystem) -> None:
        layout = new_run(shared)
        refs = write_groups(layout, [0, 1])
        remove_file(layout.trajectory(refs[0].path))
        shared.settle()
        with pytest.raises(CorruptArtefactError, match=r"arrow is missing.* \(after 20 s of looking for it\)"):
            read_groups(on(shared, "trainer"), refs, Sight(20.0, lambda text: None))

    Cases().run(range(1), train, **QUIET)


@pytest.mark.long
def test_a_replay_elsewhere_gives_up_no_sound_file() -> None:
    """Of a step that is replayed on another host nothing is moved, and nothing is generated again."""
    cases, hasty = Cases(("lustre", "beegfs", "hostile", "nfs")), 0

    def replay(shared: SharedFilesystem) -> None:
        nonlocal hasty
        layout = new_run(shared)
        refs = [ref for g in (0, 2) for ref in write_groups(layout, [g, g + 1])]
        record = make_batch(1, refs)
        hasty += not is_read(on(shared, "hasty"), tuple(refs))

        def regenerate(groups: tuple[int, ...]) -> tuple[GroupRef, ...]:
            raise AssertionError(f"groups {groups} are there")

        assert restore_groups(on(shared, "elsewhere"), record, True, regenerate, patient()) == tuple(refs)
        assert quarantined(on(shared, "truth")) == {}

    cases.run(SEEDS, replay, **QUIET)
    assert hasty > 10


# -- audit ----------------------------------------------------------------------------------------------------------


class _OneAfterTheOther:
    """A pool of no threads: the shared filesystem is told by one thread at a time what happens."""

    def __init__(self, workers: int) -> None:
        return

    def __enter__(self) -> _OneAfterTheOther:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def submit(self, call: Any, *args: Any) -> Any:
        return mock.Mock(result=lambda value=call(*args): value)


@pytest.mark.long
def test_an_audit_elsewhere_finds_a_sound_run_sound() -> None:
    """Also while the run has just been written; the violations of an old view do not outlast a second look."""
    cases, hasty, told = Cases(), 0, []

    def audit(shared: SharedFilesystem) -> None:
        nonlocal hasty
        auditor = on(shared, "auditor")
        shared.pause = lambda operation, path: watch(auditor, operation, path)
        run_on_hosts(shared, kills=0)
        with mock.patch("milesbatch.audit.trajectories_check.ThreadPoolExecutor", _OneAfterTheOther):
            hasty += not audit_run(auditor).ok
            verdict, findings = examine_patiently(auditor, looks_after(auditor, 60.0), told.append, before_repair=True)
            expected, leftovers = examine(on(shared, "truth"))
        assert expected.ok, expected.violations
        assert verdict.violations == ()
        assert sorted(map(findings.relative, findings.movable)) == sorted(map(leftovers.relative, leftovers.movable))
        assert verdict.trajectories == expected.trajectories
        assert STEPS - 1 <= verdict.steps <= STEPS, "sound as of a moment ago"

    def watch(auditor: RunLayout, operation: str, path: Path) -> None:
        if operation == "sync_directory":  # before the name is there, as `milesbatch watch` looks
            for step in range(1, STEPS + 1):
                auditor.batch(step).exists()

    with mock.patch("milesbatch.audit.patience.is_local", lambda place: False):
        cases.run(range(4), audit, **QUIET)
    assert hasty > 3 and len(told) > 3


def test_a_damaged_run_is_looked_at_three_times(tmp_path: Path) -> None:
    def audit(shared: SharedFilesystem) -> None:
        layout = new_run(shared)
        grow(layout, 2)
        on(shared, "truth").batch(2).write_bytes(b"{}\n")
        shared.settle()
        told: list[str] = []
        with mock.patch("milesbatch.audit.trajectories_check.ThreadPoolExecutor", _OneAfterTheOther):
            verdict, _ = examine_patiently(on(shared, "auditor"), (5.0, 55.0), told.append)
        assert "damaged" in {violation.kind for violation in verdict.violations}
        assert len(told) == 2 and told[0].endswith("looking again in 5 s")

    assert looks_after(RunLayout(tmp_path), 60.0) == (), "a local filesystem is looked at once"
    Cases(("nfs",)).run(range(1), audit, **QUIET)
    assert GROUPS_PER_STEP == 4
