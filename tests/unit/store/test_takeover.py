"""Taking a run over: one controller at a time, and nothing of the dead or undead counts that was not sealed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import (
    commit_batch,
    commit_checkpoint,
    flip,
    grow,
    make_incarnation,
    make_layout,
    make_run,
    past_incarnation,
    publish,
    quarantined,
    write_groups,
)

from milesbatch.decisions.resume import ResumePlan, plan_resume
from milesbatch.errors import CorruptArtefactError, FencedError, RunHeldError, StorageError
from milesbatch.records import IncarnationRecord, Seal
from milesbatch.store import takeover
from milesbatch.store.durable import create_exclusively
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint, is_alive, process_started, read_hint
from milesbatch.store.removal import take_away
from milesbatch.store.survey import Survey, read_incarnations
from milesbatch.store.takeover import Claimant, Incarnation, take_over


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


def go_on(layout: RunLayout) -> Incarnation:
    return take_over(layout, Claimant(cause="lost"), {})


def plan(found: Survey) -> ResumePlan:
    return plan_resume(found.checkpoints, len(found.batches), found.last_version)


# -- one at a time --------------------------------------------------------------------------------------------------


def test_first_start(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    taken = take_over(layout, Claimant("17", 2, "lost"), {"steps": 9})
    assert taken.number == 1
    assert taken.quarantined == ()
    (record,) = read_incarnations(layout)
    assert record == taken.record
    assert (record.cause, record.job_id, record.restart_count) == ("first", "17", 2)
    assert (record.host, record.pid) == (socket.gethostname(), os.getpid())
    assert record.recipe_changes == {"steps": 9}
    assert record.seal == Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=())


def test_second_after_death(layout: RunLayout) -> None:
    assert past_incarnation(layout) == 1
    grow(layout, 2)
    waiting = write_groups(layout, [8, 9], version=1)
    taken = go_on(layout)
    assert taken.number == 2
    assert taken.record.cause == "lost"
    assert taken.quarantined == ()
    assert taken.record.seal == Seal(last_batch=2, last_version=2, checkpoints=(2,), trajectories=(waiting[0].path,))
    assert [str(name) for name in taken.found.ready_files] == [waiting[0].path]
    assert plan(taken.found) == ResumePlan(2, True, 2)


def test_a_living_holder_is_named(layout: RunLayout) -> None:
    go_on(layout)
    with pytest.raises(RunHeldError, match=f"process {os.getpid()} on {socket.gethostname()}") as caught:
        go_on(layout)
    assert caught.value.exit_code == 75
    assert len(read_incarnations(layout)) == 1


def test_a_holder_that_ended_but_was_not_collected_is_dead(layout: RunLayout) -> None:
    child = os.fork()
    if child == 0:
        try:
            go_on(layout)
        finally:
            os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert go_on(layout).number == 2
    os.waitpid(child, 0)


def test_a_reused_pid_is_not_mistaken(layout: RunLayout) -> None:
    alive = make_incarnation(1, host=socket.gethostname(), pid=os.getpid(), process_started=process_started())
    assert is_alive(layout, alive)
    assert not is_alive(layout, alive.model_copy(update={"process_started": "this boot:1"}))
    assert not is_alive(layout, alive.model_copy(update={"pid": 2**22 + 1}))
    assert process_started(2**22 + 1) is None


def _claim(root: Path, start: float, results: multiprocessing.SimpleQueue[tuple[str, str]]) -> None:
    time.sleep(max(0.0, start - time.time()))
    outcome = ("failed", "")
    try:
        outcome = ("won", str(take_over(RunLayout(root), Claimant(), {}).number))
    except RunHeldError as error:
        outcome = ("held", error.what)
    finally:
        results.put(outcome)
    time.sleep(1.0)  # the winner is alive while the others look


def test_of_several_at_once_exactly_one_wins(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 1)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    start = time.time() + 0.2
    processes = [context.Process(target=_claim, args=(layout.root, start, results)) for _ in range(6)]
    for process in processes:
        process.start()
    outcome = [results.get() for _ in processes]
    winner = next(process.pid for process in processes if read_incarnations(layout)[1].pid == process.pid)
    for process in processes:
        process.join()
    assert sorted(kind for kind, _ in outcome) == ["held"] * 5 + ["won"]
    assert ("won", "2") in outcome
    assert all(f"process {winner} on" in said for kind, said in outcome if kind == "held")
    assert len(read_incarnations(layout)) == 2


def test_the_winners_sweep_takes_the_losers_temporary_file(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        target.write_bytes(make_incarnation(1, pid=77).to_bytes())
        source.unlink()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RunHeldError, match="process 77 on elsewhere"):
        go_on(layout)


def test_a_take_over_that_cannot_be_written(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="no space or quota"):
        go_on(layout)
    assert read_incarnations(layout) == []


def test_a_damaged_incarnation_record_stops_everything(layout: RunLayout) -> None:
    past_incarnation(layout)
    flip(layout.incarnation(1), 40)
    with pytest.raises(CorruptArtefactError, match=r"000001\.json"):
        go_on(layout)
    assert quarantined(layout) == {}


def test_an_incarnation_record_under_another_number(layout: RunLayout) -> None:
    create_exclusively(layout.incarnation(1), make_incarnation(2).to_bytes())
    with pytest.raises(CorruptArtefactError, match="record of incarnation 2"):
        go_on(layout)


def test_killed_between_seal_and_sweep(layout: RunLayout) -> None:
    """The next take-over sweeps, and what was not sealed stays out."""
    past_incarnation(layout)
    grow(layout, 1)
    seal = Seal(last_batch=1, last_version=1, checkpoints=(), trajectories=())
    create_exclusively(layout.incarnation(2), make_incarnation(2, seal=seal, host=socket.gethostname()).to_bytes())
    commit_batch(layout, 2, write_groups(layout, [4, 5, 6, 7]))
    (layout.batches / ".tmp-9-abc").write_bytes(b"half")
    (layout.weights_version(1) / ".tmp-9-abc").write_bytes(b"half")
    taken = go_on(layout)
    assert taken.number == 3
    assert taken.record.seal.last_batch == 1
    assert not list(layout.root.rglob(".tmp-*"))
    assert len(taken.quarantined) == 2


# -- another host ---------------------------------------------------------------------------------------------------


def elsewhere(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> IncarnationRecord:
    past_incarnation(layout)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    return read_incarnations(layout)[0]


def test_a_counter_that_grows_is_alive(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = LivenessHint(layout, 1, "http://10.0.0.1:1")
    hint.beat()
    record = elsewhere(layout, monkeypatch)
    timer = threading.Timer(0.7, hint.beat)
    timer.start()
    with pytest.raises(RunHeldError, match=f"process {record.pid} on {record.host}"):
        go_on(layout)
    timer.join()


def test_a_first_hint_that_comes_late_is_alive(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller writes its record before its first hint."""
    record = elsewhere(layout, monkeypatch)
    timer = threading.Timer(0.7, LivenessHint(layout, 1, "x").beat)
    timer.start()
    assert is_alive(layout, record, watch_s=3.0)
    timer.join()


@pytest.mark.parametrize("left", [None, b"", b"{torn", b"[]", b'{"count": 4}'])
def test_a_counter_that_stands_still_is_dead(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    if left is not None:
        layout.liveness(1).write_bytes(left)
    record = elsewhere(layout, monkeypatch)
    assert not is_alive(layout, record, watch_s=0.6)
    assert (read_hint(layout, 1) is None) == (left != b'{"count": 4}')


# -- the fence ------------------------------------------------------------------------------------------------------


def test_the_fence(layout: RunLayout) -> None:
    past_incarnation(layout)
    Fence(layout, 1).check()
    past_incarnation(layout)
    Fence(layout, 2)()
    with pytest.raises(FencedError) as caught:
        Fence(layout, 1)()
    assert caught.value.exit_code == 75


def test_a_fence_that_cannot_know_does_not_let_through(layout: RunLayout) -> None:
    layout.incarnation(2).symlink_to(layout.incarnation(2))  # any error that is not "there is no such file"
    with pytest.raises(StorageError):
        Fence(layout, 1).check()
    with pytest.raises(StorageError):
        write_groups(layout, [0], before_commit=Fence(layout, 1))
    assert list(layout.trajectories.iterdir()) == []


# -- zombies --------------------------------------------------------------------------------------------------------


def zombie_batch(layout: RunLayout) -> Path:
    commit_batch(layout, 3, write_groups(layout, [8, 9, 10, 11], worker="rollout-1"), incarnation=1)
    return layout.batch(3)


def zombie_weights(layout: RunLayout) -> Path:
    publish(layout, [3], incarnation=1)
    return layout.weights_manifest(3)


def zombie_checkpoint(layout: RunLayout) -> Path:
    fence = layout.incarnation(2)
    hidden = fence.rename(fence.with_suffix(".hidden"))
    commit_checkpoint(layout, 1, incarnation=1)
    hidden.rename(fence)
    return layout.checkpoint_manifest(1)


def zombie_trajectories(layout: RunLayout) -> Path:
    return layout.trajectory(write_groups(layout, [8, 9], version=1, worker="rollout-1")[0].path)


@pytest.mark.parametrize("zombie", [zombie_batch, zombie_weights, zombie_checkpoint, zombie_trajectories])
def test_what_a_zombie_commits_after_the_seal_does_not_count(
    layout: RunLayout, zombie: Callable[[RunLayout], Path]
) -> None:
    past_incarnation(layout)
    grow(layout, 2)
    past_incarnation(layout)
    path = zombie(layout)
    data = path.read_bytes()
    taken = go_on(layout)
    assert taken.number == 3
    assert taken.record.seal == Seal(last_batch=2, last_version=2, checkpoints=(2,), trajectories=())
    assert not path.exists()
    kept = quarantined(layout)
    name = next(name for name in kept if path.name in name)
    assert "written by incarnation 1 after it had been sealed" in kept[name] or "has no batch record" in kept[name]
    assert (layout.quarantine / name).read_bytes() == data
    relative = str(path.relative_to(layout.root))
    assert relative in [moved for moved, _ in taken.quarantined]
    assert plan(taken.found) == ResumePlan(2, True, 2)


def test_a_zombies_version_beside_our_batch_record(layout: RunLayout) -> None:
    """The record of step 3 is ours; the version 3 that a zombie published is not."""
    past_incarnation(layout)
    grow(layout, 2)
    past_incarnation(layout)
    commit_batch(layout, 3, write_groups(layout, [8, 9, 10, 11], version=1, incarnation=2), incarnation=2)
    publish(layout, [3], incarnation=1)
    taken = go_on(layout)
    assert len(taken.found.batches) == 3
    assert taken.found.last_version == 2
    assert "after it had been sealed" in next(iter(quarantined(layout).values()))
    assert plan(taken.found) == ResumePlan(2, True, 3)


def test_artefacts_of_the_incarnations_between_count(layout: RunLayout) -> None:
    for incarnation in (1, 2, 3):
        past_incarnation(layout)
        publish(layout, range(incarnation) if incarnation == 1 else [incarnation - 1], incarnation)
        first = 4 * (incarnation - 1)
        refs = write_groups(layout, range(first, first + 4), version=incarnation - 1, incarnation=incarnation)
        commit_batch(layout, incarnation, refs, incarnation)
    taken = go_on(layout)
    assert taken.quarantined == ()
    assert [record.incarnation for record in taken.found.batches] == [1, 2, 3]
    assert taken.found.last_version == 2


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_broken_batch_record_ends_the_chain_there(layout: RunLayout, broken: int) -> None:
    past_incarnation(layout)
    grow(layout, 4)
    flip(layout.batch(broken), 60)
    taken = go_on(layout)
    whole = broken - 1
    assert [record.step for record in taken.found.batches] == list(range(1, broken))
    assert taken.found.last_version == whole
    assert taken.found.checkpoints == [step for step in (2, 4) if step <= whole]
    assert sorted(path.stem for path in layout.batches.iterdir()) == [f"{step:06d}" for step in range(1, broken)]
    # Their groups have no fate any more: the files count as they are, and are trained on again.
    assert [name.first_group for name in taken.found.ready_files] == list(range(4 * whole, 16, 2))
    moved = [name for name, _ in taken.quarantined]
    assert len([name for name in moved if name.startswith("batches/")]) == 4 - whole
    assert len([name for name in moved if name.startswith("weights/")]) == 4 - whole
    assert plan(taken.found).last_batch == whole
    again = past_after(layout)
    assert again.quarantined == ()
    assert again.record.seal == taken.record.seal


def past_after(layout: RunLayout) -> Incarnation:
    """Take the run over as if this process had died in between."""
    newest = len(read_incarnations(layout))
    path = layout.incarnation(newest)
    record = IncarnationRecord.from_bytes(path.read_bytes(), str(path))
    path.unlink()
    create_exclusively(path, record.model_copy(update={"process_started": "earlier boot:1"}).to_bytes())
    return go_on(layout)


def test_a_missing_batch_record_ends_the_chain_too(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 3)
    layout.batch(2).unlink()
    taken = go_on(layout)
    assert len(taken.found.batches) == 1
    assert "does not follow the unbroken chain 1..1" in dict(taken.quarantined)["batches/000003.json"]


def test_a_group_with_two_fates_ends_the_chain(layout: RunLayout) -> None:
    past_incarnation(layout)
    refs = write_groups(layout, [0, 1])
    commit_batch(layout, 1, refs)
    commit_batch(layout, 2, refs)
    taken = go_on(layout)
    assert len(taken.found.batches) == 1
    assert "group 0 is trained(1)" in dict(taken.quarantined)["batches/000002.json"]


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "manifest"])
def test_a_broken_newest_checkpoint_gives_the_one_before(layout: RunLayout, how: str) -> None:
    past_incarnation(layout)
    grow(layout, 5)
    shard = layout.checkpoint_shards(4, 1) / "model.distcp"
    if how == "flip":
        flip(shard, 7)
    elif how == "truncate":
        os.truncate(shard, 10)
    elif how == "remove":
        shard.unlink()
    else:
        flip(layout.checkpoint_manifest(4), 30)
    taken = go_on(layout)
    assert taken.found.checkpoints == [2]
    assert taken.record.seal.checkpoints == (2,)
    assert plan(taken.found) == ResumePlan(2, True, 5)
    ((_, reason),) = taken.quarantined
    assert list(quarantined(layout).values()) == [reason + "\n"]
    assert not layout.checkpoint_manifest(4).exists()


def test_no_checkpoint_is_whole(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 4)
    for step in (2, 4):
        flip(layout.checkpoint_shards(step, 1) / "optim.distcp")
    taken = go_on(layout)
    assert taken.found.checkpoints == []
    assert plan(taken.found) == ResumePlan(0, False, 4)


def test_payload_without_a_manifest_is_no_artefact(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 4)
    layout.checkpoint_manifest(4).unlink()
    layout.weights_manifest(4).unlink()
    taken = go_on(layout)
    assert (taken.found.checkpoints, taken.found.last_version) == ([2], 3)
    assert taken.quarantined == ()


@pytest.mark.parametrize("hole", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("how", ["missing", "manifest", "payload"])
def test_a_hole_in_the_versions_is_filled_by_replay(layout: RunLayout, hole: int, how: str) -> None:
    """Keyframes are versions 0 and 3; checkpoints are after steps 2 and 4."""
    past_incarnation(layout)
    grow(layout, 5)
    if how == "missing":
        layout.weights_manifest(hole).unlink()
    elif how == "manifest":
        flip(layout.weights_manifest(hole), 50)
    else:
        flip(next(path for path in sorted(layout.weights_version(hole).glob("*.safetensors"))), -1)
    taken = go_on(layout)
    last, resume = taken.found.last_version, plan(taken.found)
    kept = sorted(int(path.parent.name) for path in layout.weights.glob("*/manifest.json"))
    assert last == max(kept, default=-1)
    if how == "payload" and hole < 3:
        assert last == 5  # nobody needs it: workers start from the keyframe
    elif hole > 0:
        assert last == hole - 1
    assert kept == list(range(kept[0], last + 1)) if kept else last == -1
    assert resume.checkpoint_step <= max(last, 0)
    assert resume.last_batch == 5
    missing = set(range(last + 1, 6))
    assert missing <= {*resume.replayed, *([0] if not resume.from_checkpoint else [])}
    publish(layout, sorted(missing), incarnation=2)  # the replay can publish what is missing
    assert past_after(layout).found.last_version == 5


def test_a_damaged_first_keyframe_of_a_chain_that_was_cut(layout: RunLayout) -> None:
    """Versions 0 to 2 were deleted as no longer needed; without keyframe 3 there is nothing."""
    past_incarnation(layout)
    grow(layout, 5)
    for version in range(3):
        layout.weights_manifest(version).unlink()
    flip(next(layout.weights_version(3).glob("keyframe*")))
    taken = go_on(layout)
    assert taken.record.seal.last_version == -1
    assert plan(taken.found) == ResumePlan(0, False, 5)


def test_manifests_under_another_number(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 4)
    for path, other in (
        (layout.weights_manifest(4), layout.weights_manifest(3)),
        (layout.checkpoint_manifest(4), layout.checkpoint_manifest(2)),
        (layout.batch(4), layout.batch(3)),
    ):
        path.write_bytes(other.read_bytes())
    taken = go_on(layout)
    assert (len(taken.found.batches), taken.found.last_version, taken.found.checkpoints) == (3, 3, [2])
    assert len(taken.quarantined) == 3


# -- trajectories ---------------------------------------------------------------------------------------------------


def test_of_two_files_of_a_block_one_is_kept(layout: RunLayout) -> None:
    past_incarnation(layout)
    publish(layout, [0])
    paths = [write_groups(layout, [0, 1], worker=f"rollout-{i}")[0].path for i in (1, 0)]
    other = write_groups(layout, [2, 3])[0].path
    taken = go_on(layout)
    assert [str(name) for name in taken.found.ready_files] == [paths[1], other]
    assert [reason for _, reason in taken.quarantined] == ["another file holds the same groups"]


def test_of_two_files_the_damaged_one_goes(layout: RunLayout) -> None:
    past_incarnation(layout)
    damaged, good = (write_groups(layout, [0, 1], worker=f"rollout-{i}")[0].path for i in (0, 1))
    flip(layout.trajectory(damaged), 100)
    taken = go_on(layout)
    assert [str(name) for name in taken.found.ready_files] == [good]
    assert taken.quarantined[0][0] == f"trajectories/{damaged}"


def test_the_file_that_a_record_names_is_kept(layout: RunLayout) -> None:
    past_incarnation(layout)
    first = write_groups(layout, [0, 1, 2, 3], worker="rollout-0")
    second = write_groups(layout, [0, 1, 2, 3], worker="rollout-1")
    commit_batch(layout, 1, second)
    taken = go_on(layout)
    assert taken.found.ready_files == []
    assert [path for path, _ in taken.quarantined] == [f"trajectories/{first[0].path}"]
    assert layout.trajectory(second[0].path).exists()


def test_a_file_that_is_partly_consumed_stays_ready(layout: RunLayout) -> None:
    past_incarnation(layout)
    refs = write_groups(layout, [0, 1, 2, 3])
    commit_batch(layout, 1, refs[:3])
    past_incarnation(layout)
    taken = go_on(layout)
    assert [str(name) for name in taken.found.ready_files] == [refs[0].path]
    assert [group for group in range(5) if taken.found.fates.is_pending(group)] == [3, 4]


def test_damaged_and_strange_files(layout: RunLayout) -> None:
    past_incarnation(layout)
    short, changed, good = (write_groups(layout, [g])[0].path for g in (0, 1, 2))
    os.truncate(layout.trajectory(short), 100)
    flip(layout.trajectory(changed), 200)
    (layout.trajectories / "mine.arrow").write_bytes(b"x")
    (layout.trajectories / "notes.txt").write_bytes(b"x")
    taken = go_on(layout)
    assert [str(name) for name in taken.found.ready_files] == [good]
    assert sorted(path for path, _ in taken.quarantined) == sorted(
        f"trajectories/{name}" for name in (short, changed, "mine.arrow")
    )
    assert (layout.trajectories / "notes.txt").exists()


def test_a_file_that_disappears_while_it_is_looked_at(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    from milesbatch.store import survey as module

    past_incarnation(layout)
    gone = layout.trajectory(write_groups(layout, [0])[0].path)
    real = module.digest_file

    def digest(path: Path) -> str:
        gone.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(module, "digest_file", digest)
    assert module.survey(layout, read_incarnations(layout)).ready_files == []


def test_a_broken_file_that_is_gone_when_it_is_taken_away(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem may show it a while longer than it is there."""
    past_incarnation(layout)
    stranger = layout.trajectories / "stranger.arrow"
    stranger.write_bytes(b"x")

    def late(layout: RunLayout, incarnation: int, path: Path, reason: str) -> Path:
        path.unlink()
        return take_away(layout, incarnation, path, reason)

    monkeypatch.setattr(takeover, "take_away", late)
    assert go_on(layout).quarantined == ()
    assert not stranger.exists()


def test_a_survey_never_writes(layout: RunLayout) -> None:
    past_incarnation(layout)
    grow(layout, 3)
    flip(layout.batch(2))
    before = {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")}
    from milesbatch.store.survey import survey

    survey(layout, read_incarnations(layout))
    assert {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")} == before


def test_a_newer_format_is_not_quarantined(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    from milesbatch import records
    from milesbatch.errors import FormatVersionError

    past_incarnation(layout)
    with monkeypatch.context() as patch:
        patch.setattr(records, "FORMAT_VERSION", (2, 0))
        commit_batch(layout, 1, [])
    with pytest.raises(FormatVersionError, match=r"000001\.json"):
        go_on(layout)
    assert quarantined(layout) == {}
    assert layout.batch(1).exists()


def test_the_run_can_be_taken_over_without_torch(layout: RunLayout) -> None:
    past_incarnation(layout)
    script = (
        "import sys; from pathlib import Path; from milesbatch.store.layout import RunLayout;"
        "from milesbatch.store.takeover import *; print(take_over(RunLayout(Path(sys.argv[1])), Claimant(), {}).number);"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.check_output([sys.executable, "-c", script, str(layout.root)]) == b"2\n"


def test_a_missing_incarnation_record_below_another_stops_the_start(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    past_incarnation(layout)
    past_incarnation(layout)
    layout.incarnation(1).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptArtefactError, match=r"000001\.json is missing, but 000002\.json exists"):
        take_over(layout, Claimant(), {})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_in_place_of_a_record_is_moved_away(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    (layout.batch(1)).mkdir()
    (layout.batches / ".tmp-junk").mkdir()
    taken = take_over(layout, Claimant(), {})
    assert [path for path, _ in taken.quarantined] == ["batches/000001.json"]
