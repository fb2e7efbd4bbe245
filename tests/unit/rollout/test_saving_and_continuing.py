"""A stop in relaxed mode saves what is begun; the next incarnation goes on with it, or says why not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from builders import flip, quarantined
from worker_lives import LONGEST, STOP_ID, Place, make_place, rollout

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.errors import FencedError, StoppedToContinue
from milesbatch.faults.points import set_hook
from milesbatch.ids import VersionSpan
from milesbatch.rollout.reaching import WeightsReach
from milesbatch.store.layout import TrajectoryName
from milesbatch.store.operations import Operations, installed
from milesbatch.store.unfinished import saved_blocks
from milesbatch.trajectories.inflight_reader import InflightFile, read_inflight
from milesbatch.trajectories.inflight_schema import BegunSample, InflightMetadata
from milesbatch.trajectories.inflight_schema import Life as BegunLife
from milesbatch.trajectories.inflight_writer import write_inflight
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.weights.follower import VerifiedWeights
from milesbatch.weights.reader import read_manifest


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Block 0 as a worker makes it that nobody stops."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    life = place.life()
    assert life.error is None and len(life.trajectories) == 4 and place.inflight == []
    assert [len(t.tokens) - t.prompt_tokens for t in life.trajectories].count(LONGEST) >= 2
    return life.trajectories


def only_file(place: Place) -> InflightFile:
    (name,) = place.inflight
    return read_inflight(place.layout.unfinished(name))


def check_same(found: list[Trajectory], wanted: list[Trajectory]) -> None:
    assert [(t.group_id, t.sample_index) for t in found] == [(t.group_id, t.sample_index) for t in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.loss_mask, one.seed, one.reward, one.finish_reason) == (
            other.tokens,
            other.loss_mask,
            other.seed,
            other.reward,
            other.finish_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


# -- saved and continued ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "room"), [("pulse", 4), ("pulse", 8), ("lease", 8)])
def test_what_is_begun_goes_on_as_if_nobody_had_stopped_it(
    tmp_path: Path, undisturbed: list[Trajectory], stop: str, room: int
) -> None:
    """A worker whose engine is full hears of the stop by its heartbeat, one that has room by its next question."""
    place = make_place(tmp_path, rollout=rollout(room=room))
    first = place.life(7, stop=stop)
    assert (first.error, first.commits) == (None, [])
    file = only_file(place)
    assert (file.name.first_group, file.name.last_group, file.name.incarnation) == (0, 1, 1)
    for sample, whole in zip(file.samples, undisturbed, strict=True):
        assert sample.tokens == whole.tokens[whole.prompt_tokens :][:7]
        assert sample.lives == (BegunLife(1, 7),) and sample.finish_reason is None
    (saved,) = first.event("episodes_saved")
    assert (saved["path"], saved["unfinished"], saved["finished"], saved["tokens"]) == (str(file.name), 4, 0, 28)

    second = place.life()
    (continued,) = second.event("episodes_continued")
    assert (continued["path"], continued["unfinished"], continued["tokens"]) == (str(file.name), 4, 28)
    check_same(second.trajectories, undisturbed)
    assert second.tokens_generated == sum(t.response_tokens for t in undisturbed) - 28
    for trajectory, sample in zip(second.trajectories, file.samples, strict=True):
        assert trajectory.env["continued_from"] == [{"incarnation": 1, "tokens": 7}]
        assert (trajectory.started, trajectory.incarnation) == (sample.started, 2)
        assert trajectory.started < trajectory.ended
        assert [span.version for span in trajectory.versions] == [0]
    assert place.inflight == [], "the block is committed"
    (commit,) = second.commits
    assert commit.response_tokens == second.tokens_generated, "speed counts what was drawn"


def test_tokens_say_which_version_drew_them(place: Place) -> None:
    place.life(9)
    begun = {(s.group_id, s.sample_index): s for s in only_file(place).samples}
    place.publish(1, 2)
    second = place.life()
    for trajectory in second.trajectories:
        sample = begun[trajectory.group_id, trajectory.sample_index]
        prompt = trajectory.prompt_tokens
        assert trajectory.tokens[prompt : prompt + 9] == sample.tokens
        assert trajectory.logprobs[prompt : prompt + 9] == sample.logprobs
        assert trajectory.versions == (VersionSpan(prompt, 0), VersionSpan(prompt + 9, 2))
        assert trajectory.weights_digest != sample.weights[0]
    (commit,) = second.commits
    assert {(group.version_min, group.version_max) for group in commit.groups} == {(0, 2)}, "staleness sees the oldest"


def test_interrupted_again_and_again(place: Place, undisturbed: list[Trajectory]) -> None:
    place.life(3)
    (first,) = place.inflight
    place.life(4)
    (second,) = place.inflight
    assert second != first, "the newer file has all that was in the older one"
    assert [sample.lives for sample in only_file(place).samples] == [(BegunLife(1, 3), BegunLife(2, 7))] * 4
    place.publish(1)
    place.life(5)
    (sample, *_) = only_file(place).samples
    assert sample.versions == (VersionSpan(0, 0), VersionSpan(7, 1)) and len(set(sample.weights)) == 2
    last = place.life()
    assert [one.env["continued_from"] for one in last.trajectories] == [
        [{"incarnation": 1, "tokens": 3}, {"incarnation": 2, "tokens": 7}, {"incarnation": 3, "tokens": 12}]
    ] * 4
    for one, whole in zip(last.trajectories, undisturbed, strict=True):
        assert one.tokens[: one.prompt_tokens + 7] == whole.tokens[: one.prompt_tokens + 7]
    assert place.inflight == []


def test_a_life_that_drew_nothing_leaves_what_there_was(place: Place) -> None:
    place.life(3)
    before = place.inflight
    with_nothing = place.life(1, stop="pulse", rows=4)
    assert with_nothing.tokens_generated == 4
    assert place.inflight != before
    (name,) = place.inflight
    stopped_at_once = place.life(None, stop="pulse", blocks=0)
    assert stopped_at_once.answers == [] and place.inflight == [name]


def test_finished_samples_of_a_block_are_kept_and_not_made_again(tmp_path: Path) -> None:
    """Rows are scarce: of the block's four samples two are done, one is begun and one waits."""
    place = make_place(tmp_path, rollout=rollout(6))
    first = place.life(15, rows=1)
    file = only_file(place)
    assert [(s.finish_reason, len(s.tokens)) for s in file.samples] == [("length", 6), ("length", 6), (None, 3)]
    assert (first.event("episodes_saved")[0]["finished"], first.event("episodes_saved")[0]["unfinished"]) == (2, 1)
    second = place.life(rows=1)
    assert second.tokens_generated == 24 - 15
    whole = make_place(tmp_path / "other", rollout=rollout(6)).life(rows=1)
    check_same(second.trajectories, whole.trajectories)
    assert [len(t.env.get("continued_from", [])) for t in second.trajectories] == [1, 1, 1, 0]


def test_a_block_all_of_whose_samples_were_finished(tmp_path: Path) -> None:
    place = make_place(tmp_path, rollout=rollout(6))
    place.life(5)
    done = [replace(s, finish_reason="length") for s in only_file(place).samples]
    replace_file(place, done)
    second = place.life()
    assert second.tokens_generated == 0
    assert [t.finish_reason for t in second.trajectories] == ["length"] * 4


def test_what_is_done_is_committed_and_what_is_not_is_saved(tmp_path: Path) -> None:
    """Two leases are open; the first one's last token is drawn in the step after which the worker must stop."""
    place = make_place(tmp_path, rollout=rollout(6, room=8))
    life = place.life(6, blocks=2, rows=4)
    assert [commit.block for commit in life.commits] == [0]
    assert [answer.block for answer in life.answers] == [0, 1]
    assert place.inflight == [], "nothing of the second block was begun"
    place = make_place(tmp_path / "b", rollout=rollout(6, room=8))
    life = place.life(7, blocks=2, rows=5)
    assert [commit.block for commit in life.commits] == [0]
    (name,) = saved_blocks(place.layout)
    assert (name.first_group, name.last_group) == (2, 3)


def test_a_worker_that_waits_for_weights_saves_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version is damaged, so it waits for another; meanwhile it is told to stop."""

    def reach(self: WeightsReach, version: int) -> VerifiedWeights:
        if version == 1:
            raise StoppedToContinue("stopped while damaged weights were published again")
        return self._follower.advance_to(version)

    monkeypatch.setattr(WeightsReach, "reach", reach)
    life = place.life(5, stop="a newer version")
    assert isinstance(life.error, StoppedToContinue)
    assert [len(sample.tokens) for sample in only_file(place).samples] == [5] * 4


# -- not saved --------------------------------------------------------------------------------------------------------


def test_bitwise_mode_finishes_its_block_and_saves_nothing(tmp_path: Path) -> None:
    place = make_place(tmp_path, determinism="bitwise")
    life = place.life(5, stop="nobody looks")
    assert (life.error, len(life.commits), place.inflight) == (None, 1, [])
    assert all("continued_from" not in t.env for t in life.trajectories)


def test_a_finished_run_needs_nothing_more(tmp_path: Path) -> None:
    place = make_place(tmp_path, rollout=rollout(room=8))
    life = place.life(5, stop="finished")
    assert (life.error, life.commits, place.inflight) == (None, [], [])


def test_a_fenced_worker_saves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_over = place.layout.incarnation(2)

    def close(self: Any) -> None:
        taken_over.write_bytes(b"{}")
        original(self)

    original = EmbeddedEngine.close
    monkeypatch.setattr(EmbeddedEngine, "close", close)
    life = place.life(5)
    assert isinstance(life.error, FencedError)
    assert list(place.layout.inflight.iterdir()) == []


class Full(Operations):
    """No space for a certain kind of file."""

    def __init__(self, place: Path, number: int = errno.ENOSPC) -> None:
        self._place, self._number = place, number

    def create(self, path: Path) -> BinaryIO:
        if path.parent == self._place:
            raise OSError(self._number, os.strerror(self._number), str(path))
        return super().create(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_without_space_it_says_so_and_goes(
    place: Place, undisturbed: list[Trajectory], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    place.life(3)
    before = place.inflight
    with installed(Full(place.layout.inflight, number)):
        life = place.life(4)
    assert life.error is None
    assert place.inflight == before, "what was saved before is still good"
    (told,) = life.event("episodes_not_saved")
    assert (told["unfinished"], told["tokens"]) == (4, 28) and str(place.layout.inflight) in told["error"]
    assert "unfinished episodes are not saved: " in capsys.readouterr().err
    check_same(place.life().trajectories, undisturbed)


# -- not continued ----------------------------------------------------------------------------------------------------


def replace_file(place: Place, samples: list[BegunSample], **changes: Any) -> TrajectoryName:
    """Put ``samples`` in the place of the one file that there is."""
    file = only_file(place)
    place.layout.unfinished(file.name).unlink()
    name = file.name
    values = {"groups": range(name.first_group, name.last_group + 1), "incarnation": 1, "worker": "rollout-0"}
    written, _ = write_inflight(
        place.layout, samples, **{**values, "metadata": file.metadata, "before_commit": lambda: None, **changes}
    )
    return written


def allreplace(**changes: Any) -> Callable[[Place], None]:
    return lambda place: void(replace_file(place, [replace(s, **changes) for s in only_file(place).samples]))


def void(value: object) -> None:
    return None


def other_weights(place: Place) -> None:
    """Version 0 was lost, and another one was published under its number."""
    shutil.rmtree(place.layout.weights_version(0))
    place.publish(0, salt=0.5)


def other_run(place: Place) -> None:
    replace_file(place, list(only_file(place).samples), metadata=InflightMetadata("run-9", "xxh128:" + "0" * 32))


def other_tokenizer(place: Place) -> None:
    run_id = only_file(place).metadata.run_id
    replace_file(place, list(only_file(place).samples), metadata=InflightMetadata(run_id, "xxh128:" + "1" * 32))


def too_long(place: Place) -> None:
    samples = only_file(place).samples
    longer = [
        replace(s, tokens=s.tokens * 8, logprobs=s.logprobs * 8, lives=(BegunLife(1, 8 * len(s.tokens)),))
        for s in samples
    ]
    replace_file(place, longer)


def stale(place: Place) -> None:
    place.publish(1, 2, 3)  # step 4 takes versions 1 and up


def newer(place: Place) -> None:
    allreplace(versions=(VersionSpan(0, 7),))(place)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (allreplace(prompt_digest="xxh128:" + "a" * 32), "the prompt has other tokens"),
        (allreplace(lives=(BegunLife(9, 5),)), "incarnation 9 has not ended"),
        (other_weights, "policy version 0 was published again with other weights"),
        (stale, "policy version 0 is too old for step 4"),
        (newer, "policy version 7 is newer than 0, the one in use"),
        (too_long, "it is longer than a response may be"),
        (other_run, "it is of run run-9, or of another tokenizer"),
        (other_tokenizer, "or of another tokenizer"),
        (allreplace(tokens=(5, 5, 5, 5, 5000)), "token ids outside 0 .. 60"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_not_go_on_is_generated_from_the_start(
    place: Place, change: Callable[[Place], None], reason: str
) -> None:
    place.life(5)
    change(place)
    life = place.life()
    assert life.error is None
    ignored = [event for event in life.event("inflight_ignored") if reason in event["reason"]]
    assert [event["episodes"] for event in ignored] == [4]
    assert len(life.trajectories) == 4 and all("continued_from" not in t.env for t in life.trajectories)
    assert life.tokens_generated == sum(t.response_tokens for t in life.trajectories)
    assert place.inflight == [], "the block is committed: nobody needs the file"
    assert quarantined(place.layout) == {}


@pytest.mark.parametrize("moment", ["before the take-over", "after it"])
def test_a_damaged_manifest_proves_nothing(place: Place, moment: str) -> None:
    place.life(5)
    place.publish(1)

    def damage() -> None:
        flip(place.layout.weights_manifest(0), 40)

    if moment == "after it":
        life = place.life(then=damage)
    else:
        damage()
        life = place.life()
    assert [event["reason"] for event in life.event("inflight_ignored")] == [
        "policy version 0 is not published any more"
    ]
    assert [span.version for t in life.trajectories for span in t.versions] == [1] * 4


def test_only_samples_that_are_too_old_begin_anew(place: Place) -> None:
    place.publish(1)
    place.life(6)
    samples = list(only_file(place).samples)
    old = replace(
        samples[1], versions=(VersionSpan(0, 0), VersionSpan(2, 1)), weights=(_digest(place, 0), _digest(place, 1))
    )
    replace_file(place, [samples[0], old, *samples[2:]])
    place.publish(2, 3)
    life = place.life()
    assert [(e["reason"], e["episodes"]) for e in life.event("inflight_ignored")] == [
        ("policy version 0 is too old for step 4", 1)
    ]
    assert life.event("episodes_continued")[0]["unfinished"] == 3
    assert [t.versions[0].version for t in life.trajectories] == [1, 3, 1, 1]


def _digest(place: Place, version: int) -> str:
    manifest = read_manifest(place.layout, version)
    assert manifest is not None
    return manifest.weights_digest


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "foreign"])
def test_a_damaged_file_is_put_away_and_nothing_is_lost(
    place: Place, undisturbed: list[Trajectory], damage: str
) -> None:
    place.life(5)
    (name,) = saved_blocks(place.layout)
    path = place.layout.unfinished(name)
    if damage == "flipped":
        flip(path, path.stat().st_size // 2)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "foreign":
        path.write_bytes(b"something else")
    else:
        path.unlink()
    life = place.life(unfinished=[name])
    assert life.error is None
    (ignored,) = life.event("inflight_ignored")
    assert ("is missing" if damage == "gone" else "is damaged") in ignored["reason"]
    check_same(life.trajectories, undisturbed)
    assert len(quarantined(place.layout)) == (damage != "gone")
    assert place.inflight == []


def test_an_older_file_helps_when_the_newer_one_is_damaged(place: Place, undisturbed: list[Trajectory]) -> None:
    """Killed between the commit of the newer file and the deletion of the older one."""
    place.life(3)
    (name,) = place.inflight
    older = place.layout.unfinished(name).read_bytes()
    place.life(4)
    (newer,) = place.inflight
    place.layout.unfinished(name).write_bytes(older)
    assert place.inflight == [newer, name]
    flip(place.layout.unfinished(newer), 300)
    life = place.life()
    assert [event["path"] for event in life.event("inflight_ignored")] == [newer]
    assert [(event["path"], event["tokens"]) for event in life.event("episodes_continued")] == [(name, 12)]
    check_same(life.trajectories, undisturbed)
    assert place.inflight == []


# -- killed -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """SIGKILL: no handler runs."""


def test_killed_after_reading_it_the_file_is_used_again(
    place: Place, undisturbed: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.life(5)
    before = place.inflight

    def killed(*arguments: Any, **options: Any) -> None:
        raise Killed

    for moment in ("milesbatch.rollout.loop.submit", "milesbatch.rollout.loop.write_trajectories"):
        with monkeypatch.context() as patch:
            patch.setattr(moment, killed)
            with pytest.raises(Killed):
                place.life()
        assert place.inflight == before
    life = place.life()
    assert life.event("episodes_continued")[0]["tokens"] == 20
    check_same(life.trajectories, undisturbed)


def test_killed_before_the_older_file_is_deleted(place: Place, undisturbed: list[Trajectory]) -> None:
    place.life(3)

    def killed(name: str) -> None:
        if name == "rollout.saved":
            raise Killed

    set_hook(killed)
    try:
        with pytest.raises(Killed):
            place.life(4)
    finally:
        set_hook(None)
    assert [TrajectoryName.parse(name).incarnation for name in place.inflight] == [2, 1], "the newer one first"
    life = place.life()
    assert [event["tokens"] for event in life.event("episodes_continued")] == [28]
    check_same(life.trajectories, undisturbed)
    assert place.inflight == []


def test_a_stop_token_ends_a_continued_response(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    whole = make_place(tmp_path / "whole").life()
    stops = [t for t in whole.trajectories if t.finish_reason == "stop"]
    assert all(t.tokens[-1] == STOP_ID for t in stops)
    place.life(2)
    check_same(place.life().trajectories, whole.trajectories)
