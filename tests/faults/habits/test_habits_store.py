"""Commits, take-over, seal, fence and survey on a shared filesystem: never two winners, nothing sound is given up."""

from __future__ import annotations

import contextlib

import pytest
from builders import (
    GROUPS_PER_STEP,
    commit_batch,
    grow,
    make_batch,
    make_recipe,
    make_run,
    publish,
    quarantined,
    write_groups,
)
from seeded import QUIET, Cases, on, patient, start
from shared_filesystem import SharedFilesystem

from milesbatch.decisions.origin import BEGINNING
from milesbatch.errors import CorruptArtefactError, FencedError, RunHeldError, StorageError
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    make_directory,
    move_to_quarantine,
    publish_file,
    read_optional,
    remove_file,
    remove_tree,
    replace_hint,
    sweep_temporary,
    verify_file,
)
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint, is_alive
from milesbatch.store.run import open_run, read_run_record
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.recording import commit_batch_record

SEEDS = range(12)
STEPS = 3


def grown(shared: SharedFilesystem) -> RunLayout:
    """A run of three steps with one incarnation, whose hosts are ``head``; what they wrote is just written."""
    layout = make_run(on(shared, "head").root, make_recipe(steps=STEPS))
    start(layout)
    grow(layout, STEPS)
    write_groups(layout, [STEPS * GROUPS_PER_STEP, STEPS * GROUPS_PER_STEP + 1], version=STEPS - 1)
    return layout


# -- commits --------------------------------------------------------------------------------------------------------


def test_of_two_writers_of_a_record_at_most_one_succeeds() -> None:
    """Whatever becomes of the replies: who is told that he has won has won, and who has not is told so."""
    cases = Cases()
    ends: set[str] = set()

    def race(shared: SharedFilesystem) -> None:
        won = []
        for host in ("a", "b", "c"):
            data = f"record of {host}".encode()
            try:
                make_directory(on(shared, host).batches)
                create_exclusively(on(shared, host).batch(1), data)
                won.append(data)
                ends.add("won")
            except AlreadyExistsError:
                ends.add("lost")
            except StorageError:
                ends.add("failed")
        there = read_optional(on(shared, "truth").batch(1))
        assert won in ([], [there]) or set(won) == {there}
        assert len(won) <= 1

    cases.run(range(40), race, lost_replies=0.1)
    assert ends == {"won", "lost", "failed"} and cases.mishaps["lost_replies"] > 40


def test_operations_that_took_effect_are_not_failures() -> None:
    """A reply that is lost on EEXIST or ENOENT is no reason to end a process; EIO may be."""
    cases, failed = Cases(), []

    def work(shared: SharedFilesystem) -> None:
        layout = on(shared, "a")
        moves = {
            "make_directory": lambda: make_directory(layout.batches),
            "publish_file": lambda: publish_file(layout.batch(1), b"one"),
            "replace_hint": lambda: replace_hint(layout.batch(2), b"two"),
            "quarantine": lambda: move_to_quarantine(layout.batch(1), layout.quarantine, "a reason"),
            "remove_tree": lambda: remove_tree(layout.batches),
        }
        for name, move in moves.items():
            try:
                move()
            except StorageError as error:
                assert "Input/output" in error.what, name
                failed.append(name)
                return
        assert not on(shared, "truth").batches.exists()
        assert [p.read_bytes() for p in on(shared, "truth").quarantine.glob("batches.000001.json.????????")] == [b"one"]

    cases.run(range(60), work, lost_replies=0.1, refused=0.0, full_targets=0, silly_names=0.0)
    assert 5 < len(failed) < cases.count / 4
    assert cases.mishaps["lost_replies"] > 100


@pytest.mark.long
def test_two_starts_in_one_directory_make_one_run() -> None:
    """A start that does not see the run of another one neither makes a second nor touches the first."""
    cases = Cases()

    def two_starts(shared: SharedFilesystem) -> None:
        made, recipes = [], {"a": make_recipe(steps=3), "b": make_recipe(steps=4)}
        on(shared, "b").run_record.exists()  # and remembers that it is missing
        for host, recipe in recipes.items():
            layout = on(shared, host)
            with contextlib.suppress(RunHeldError):
                lay_out(layout, recipe)
                made.append(commit_run(layout, recipe, {}))
        (record,) = made
        shared.settle()
        assert read_run_record(on(shared, "b")) == record
        start(on(shared, "b"))
        assert open_run(on(shared, "c"), 1, patient()).recipe == recipes["a"]

    Cases(("nfs",)).run(range(40), two_starts, **QUIET)
    cases.run(range(4), lambda shared: two_starts(shared), **QUIET, own_change_refreshes=True, whole_s=0.0)


# -- take-over ------------------------------------------------------------------------------------------------------


def test_a_take_over_elsewhere_finds_all_that_was_committed() -> None:
    """NFS by looking anew, Lustre and BeeGFS by waiting a moment; nothing sound is given up."""
    cases, hasty = Cases(("nfs", "lustre", "beegfs")), 0

    def go_on(shared: SharedFilesystem) -> None:
        nonlocal hasty
        grown(shared)
        expected = survey(on(shared, "truth"), []).seal()
        hasty += survey(on(shared, "hasty"), [], origin=BEGINNING).seal() != expected
        taken = start(on(shared, "other"))
        assert taken.record.seal == expected
        assert taken.quarantined == () and quarantined(on(shared, "truth")) == {}

    cases.run(SEEDS, go_on, **QUIET)
    assert hasty > 10, "who does not wait misses something"


def test_a_take_over_by_a_host_that_watched() -> None:
    """It remembers names as missing, and listings, from when it looked."""
    cases, hasty = Cases(("nfs", "lustre", "beegfs")), 0

    def go_on(shared: SharedFilesystem) -> None:
        nonlocal hasty
        layout = make_run(on(shared, "head").root, make_recipe(steps=STEPS))
        start(layout)
        other = on(shared, "other")
        patient().until_seen(lambda: read_incarnations(other))
        for step in range(STEPS + 1):
            survey(other, [], origin=BEGINNING)
            for path in (other.batch(step + 1), other.weights_manifest(step), other.checkpoint_manifest(step + 1)):
                path.exists()
        grow(layout, STEPS)
        expected = survey(on(shared, "truth"), []).seal()
        hasty += survey(other, [], origin=BEGINNING).seal() != expected
        assert start(other).record.seal == expected
        assert quarantined(on(shared, "truth")) == {}

    cases.run(SEEDS, go_on, **QUIET)
    assert hasty > 10


def test_what_must_be_there_is_looked_for() -> None:
    """Where nothing helps but waiting: a hole in what is seen is not taken for a loss."""
    cases = Cases(("hostile",))
    waited: list[float] = []

    def go_on(shared: SharedFilesystem) -> None:
        grown(shared)
        shared.settle()
        grow_more(on(shared, "head"))
        began_s = shared.clock.now_s
        other = on(shared, "other")
        other.batch(STEPS + 2).exists()
        found = patient().until_complete(
            lambda: survey(
                other, read_incarnations(other), last_batch=STEPS + 2, last_version=STEPS + 2, origin=BEGINNING
            ),
            lambda found: found.unseen,
        )
        waited.append(shared.clock.now_s - began_s)
        assert found.broken == []
        assert len(found.batches) == found.last_version == STEPS + 2

    cases.run(range(30), go_on, **QUIET)
    assert 5 < max(waited) < 90 and cases.mishaps["cut short"] > 20


def grow_more(layout: RunLayout) -> None:
    """Two steps more, versions and batch records only."""
    publish(layout, [STEPS + 1, STEPS + 2])
    for step in (STEPS + 1, STEPS + 2):
        first = (step - 1) * GROUPS_PER_STEP
        refs = [ref for g in (first, first + 2) for ref in write_groups(layout, [g, g + 1], version=step - 2)]
        commit_batch(layout, step, refs)


def test_a_manifest_before_its_payload_is_not_damage() -> None:
    cases, hasty = Cases(("hostile", "lustre")), 0

    def look(shared: SharedFilesystem) -> None:
        nonlocal hasty
        layout = grown(shared)
        other = on(shared, "other")
        records = read_incarnations(layout)
        at_once = survey(other, records, origin=BEGINNING)
        hasty += bool(at_once.broken or at_once.last_version < STEPS)
        found = patient().until_complete(
            lambda: survey(other, records, last_batch=STEPS, last_version=STEPS, origin=BEGINNING),
            lambda found: found.unseen,
        )
        assert found.broken == [] and found.last_version == len(found.batches) == STEPS

    cases.run(range(20), look, **QUIET, listed_s=0.0)
    assert hasty > 10


def test_a_real_loss_is_told_after_the_wait() -> None:
    """A record that is gone for good, below others, ends the search; what follows it is put away, as ever."""

    def lose(shared: SharedFilesystem) -> None:
        layout = grown(shared)
        on(shared, "truth").batch(2).read_bytes()
        remove = on(shared, "truth").batch(2)
        move_to_quarantine(remove, remove.parent.parent / "elsewhere", "")
        shared.settle()
        began_s = shared.clock.now_s
        taken = start(on(shared, "other"))
        assert 90 <= shared.clock.now_s - began_s < 2 * 90 + 20
        assert len(taken.found.batches) == 1
        assert "000003.json" in " ".join(quarantined(on(shared, "truth")))
        shared.settle()
        assert len(read_incarnations(layout)) == 2

    Cases(("nfs",)).run(range(3), lose, **QUIET)


def test_of_two_hosts_that_take_over_one_wins() -> None:
    cases, held = Cases(), 0

    def race(shared: SharedFilesystem) -> None:
        nonlocal held
        grown(shared)
        numbers = []
        for host in ("b", "c", "b"):
            try:
                numbers.append(start(on(shared, host), Sight(5.0, lambda text: None)).number)
            except (RunHeldError, CorruptArtefactError, StorageError):
                held += 1  # it does not see (all of) what was there before its own
        assert numbers == list(range(2, 2 + len(numbers))), "each number once"
        shared.settle()
        assert [record.incarnation for record in read_incarnations(on(shared, "d"))] == [1, *numbers]

    cases.run(SEEDS, race, **QUIET)
    assert held > 0


def test_a_living_controller_elsewhere_is_seen_to_live() -> None:
    """Its hint is replaced all the time: what it was before is stale, not an error."""
    cases = Cases()

    def watch(shared: SharedFilesystem) -> None:
        layout = make_run(on(shared, "head").root)
        record = start(layout).record.model_copy(update={"host": "head"})
        hint = LivenessHint(layout, 1, "http://head")
        hint.beat()
        shared.settle()
        other = on(shared, "other")
        assert not is_alive(other, record), "nobody beats"

        def beat_and_sleep(seconds: float) -> None:
            shared.clock.now_s += seconds
            hint.beat()

        shared.clock.sleep = beat_and_sleep  # type: ignore[method-assign]
        assert is_alive(other, record, watch_s=60.0)

    cases.run(SEEDS, watch, **QUIET)
    assert cases.mishaps["stale_handles"] > 3


# -- fence ----------------------------------------------------------------------------------------------------------


def test_what_passes_an_old_fence_does_not_count() -> None:
    """A zombie that does not see the new incarnation commits; neither the new one nor the one after uses it."""
    cases, passed = Cases(("nfs", "lustre", "beegfs")), 0

    def outlive(shared: SharedFilesystem) -> None:
        nonlocal passed
        layout = grown(shared)
        zombie = Fence(layout, 1)
        zombie.check()
        second = start(on(shared, "second"))
        step = len(second.found.batches) + 1
        refs = write_groups(on(shared, "second"), range(12, 16), version=2, incarnation=2, samples=2)
        late = make_batch(step, refs, incarnation=1)
        try:
            commit_batch_record(layout, late, zombie, patient())
            passed += 1
        except FencedError:
            pass
        mine = make_batch(step, refs, incarnation=2)
        commit_batch_record(on(shared, "second"), mine, Fence(on(shared, "second"), 2), patient())
        assert on(shared, "truth").batch(step).read_bytes() == mine.to_bytes()
        shared.settle()
        assert survey(on(shared, "third"), read_incarnations(on(shared, "third"), at_least=2)).batches[-1] == mine

    cases.run(SEEDS, outlive, **QUIET)
    assert 5 < passed < cases.count


@pytest.mark.long
def test_who_does_not_see_the_seals_does_not_go_on() -> None:
    """Without the record of his own incarnation, what a zombie wrote would seem to count to a trainer elsewhere."""
    cases, refused = Cases(), 0

    def read(shared: SharedFilesystem) -> None:
        nonlocal refused
        grown(shared)
        shared.settle()
        elsewhere = on(shared, "elsewhere")
        assert len(read_incarnations(elsewhere)) == 1
        start(on(shared, "second"))
        try:
            records = read_incarnations(elsewhere, at_least=2)
        except CorruptArtefactError as error:
            assert error.unseen is not None
            refused += 1
            records = patient().until_seen(lambda: read_incarnations(elsewhere, at_least=2))
        assert len(records) == 2

    cases.run(SEEDS, read, **QUIET)
    assert refused > 10


# -- leftovers ------------------------------------------------------------------------------------------------------


def test_names_of_deleted_files_are_nobodys_artefact() -> None:
    """``.nfs...`` stays for a while, and must be named by no record."""

    def leave(shared: SharedFilesystem) -> None:
        layout = on(shared, "head")
        lay_out(layout, make_recipe())
        publish_file(layout.model / "config.json", b"{}")
        publish_file(layout.model / "old.json", b"{}")
        remove_file(layout.model / "old.json")
        publish_file(layout.batches / "x", b"")
        remove_file(layout.batches / "x")
        names = [path.name for path in layout.model.iterdir()]
        assert any(name.startswith(".nfs") for name in names)
        lay_out(layout, make_recipe())
        record = commit_run(layout, make_recipe(), {})
        assert {ref.path for ref in record.files} == {"recipe.yaml", "model/config.json"}
        assert sweep_temporary(layout.model) == 0
        for ref in record.files:
            verify_file(layout.root / ref.path, ref)

    Cases(("nfs",)).run(range(5), leave, **{**QUIET, "silly_names": 1.0})


def test_nothing_waits_where_nothing_may(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without patience the same view is an error at once, and no time passes."""

    def look(shared: SharedFilesystem) -> None:
        before_s = shared.clock.now_s
        with pytest.raises(CorruptArtefactError, match="is missing"):
            AT_ONCE.until_seen(lambda: read_incarnations(on(shared, "b"), at_least=1))
        assert shared.clock.now_s - before_s < 0.1

    Cases(("hostile",)).run(range(1), look)
