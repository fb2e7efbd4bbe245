"""Retiring weights in small real runs: what goes, what keeps it from going, and how a run goes on without it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from builders import flip, grow, make_recipe, make_run, past_incarnation, publish, unfenced

from milesbatch.errors import CorruptArtefactError, DivergenceError, FencedError, StorageFullError
from milesbatch.records import Retirement
from milesbatch.store import durable
from milesbatch.store.fence import Fence
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import Seals, read_incarnations, survey
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer import retiring
from milesbatch.trainer.retiring import Retired, Retiring
from milesbatch.weights.follower import Follower
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import RetiredError, is_retired, read_manifest
from milesbatch.weights.rebuild import rebuild

STEPS = 8
"""Checkpoints 2, 4, 6 and 8, keyframes 0, 3 and 6: with 2 checkpoints kept and staleness 1, version 4 is needed."""


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    grow(layout, STEPS)
    return layout


def retire(
    layout: RunLayout, workers: int | None = STEPS, incarnation: int = 1, newest: int = STEPS, **changes: object
) -> Retired | None:
    return Retiring(layout, make_recipe(**changes), Fence(layout, incarnation)).retire(newest, workers)


def payload(layout: RunLayout) -> set[int]:
    """Versions with a payload file."""
    return {int(path.parent.name) for path in layout.weights.glob("*/*.safetensors")}


def record(layout: RunLayout, version: int) -> Retirement:
    path = layout.weights_retirement(version)
    return Retirement.from_bytes(path.read_bytes(), str(path))


# -- what goes ------------------------------------------------------------------------------------------------------


def test_everything_below_the_newest_keyframe_that_is_old_enough_goes(layout: RunLayout) -> None:
    assert retire(layout) == Retired(0, 2, 3)
    assert payload(layout) == set(range(3, STEPS + 1))
    for version in range(STEPS + 1):
        assert is_retired(layout, version) == (version < 3)
        assert read_manifest(layout, version) is not None
    told = record(layout, 1)
    assert (told.version, told.base, told.needed, told.checkpoint, told.staleness, told.incarnation) == (
        1,
        3,
        4,
        6,
        1,
        1,
    )
    for version in range(3, STEPS + 1):
        assert rebuild(layout, version).version == version
    assert retire(layout) is None, "a second time there is nothing to do"


@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        (None, {}),  # a worker is starting
        (2, {}),  # one is behind: the keyframe that it could need is version 0
        (STEPS, {"weights": {"retire": False}}),
        (STEPS, {"checkpoint": {"keep": 5}}),  # the starting model stands in for the fifth checkpoint
        (STEPS, {"rollout": {"samples_per_group": 2, "groups_per_lease": 2, "staleness": 3}}),
    ],
)
def test_what_keeps_everything(layout: RunLayout, workers: int | None, changes: dict[str, object]) -> None:
    assert retire(layout, workers, **changes) is None
    assert payload(layout) == set(range(STEPS + 1))


def test_a_reader_keeps_what_it_holds_until_it_ends(layout: RunLayout) -> None:
    with holding(layout, 1, "test"):
        assert retire(layout) is None
    assert retire(layout) == Retired(0, 2, 3)
    assert list(layout.holds.iterdir()) == []


def test_a_reader_that_was_killed_pins_nothing_for_ever(layout: RunLayout) -> None:
    with holding(layout, 1, "test"):
        (hold,) = layout.holds.iterdir()
        data = hold.read_bytes()
    hold.write_bytes(data)
    now = [100.0]
    retiring_ = Retiring(layout, make_recipe(), Fence(layout, 1))
    retiring_._holds._now_s = lambda: now[0]
    assert retiring_.retire(STEPS, STEPS) is None
    now[0] += 59.0
    assert retiring_.retire(STEPS, STEPS) is None
    now[0] += 2.0
    assert retiring_.retire(STEPS, STEPS) == Retired(0, 2, 3)
    assert not hold.exists()


def test_a_damaged_full_copy_is_no_base(layout: RunLayout) -> None:
    """Deleting on the strength of it would leave no way to any version before the next keyframe."""
    (keyframe,) = layout.weights_version(3).glob("keyframe.*")
    flip(keyframe, 100)
    assert retire(layout) is None
    assert payload(layout) == set(range(STEPS + 1))


def test_checkpoints_that_are_kept_for_ever_hold_no_weights(layout: RunLayout) -> None:
    assert retire(layout, checkpoint={"keep": 2, "keep_every": 2}) == Retired(0, 2, 3)


def test_what_a_fenced_incarnation_committed_is_no_base(layout: RunLayout) -> None:
    incarnation = past_incarnation(layout)
    hidden = layout.incarnation(incarnation).rename(layout.root / "hidden")
    publish(layout, [9], incarnation=1, keyframe_every=9)
    hidden.rename(layout.incarnation(incarnation))
    accept = Seals(read_incarnations(layout)).accept_weights
    manifest = read_manifest(layout, 9)
    assert manifest is not None and not accept(manifest)
    assert not Retiring(layout, make_recipe(), Fence(layout, incarnation))._is_whole_keyframe(9)


# -- crashes --------------------------------------------------------------------------------------------------------


def killed_at(monkeypatch: pytest.MonkeyPatch, name: str, time: int) -> None:
    """The process ends instead of calling ``name`` for the ``time``-th time."""
    calls: list[int] = []
    real = getattr(retiring, name)

    def call(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == time:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(retiring, name, call)


@pytest.mark.parametrize("name", ["create_exclusively", "remove_files"])
@pytest.mark.parametrize("time", [1, 2, 3])
def test_the_next_process_goes_on_where_one_was_killed(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, name: str, time: int
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, name, time)
        retire(layout)
    for version in range(3, STEPS + 1):
        assert rebuild(layout, version).version == version
    for version in range(3):
        has_all = all((layout.weights_version(version) / ref.path).exists() for ref in files(layout, version))
        assert has_all or is_retired(layout, version), "payload went before its retirement"
    retire(layout)
    assert payload(layout) == set(range(3, STEPS + 1))
    assert [record(layout, version).version for version in range(3)] == [0, 1, 2]


def files(layout: RunLayout, version: int) -> Iterable[durable.FileRef]:
    manifest = read_manifest(layout, version)
    assert manifest is not None
    return manifest.files


def test_a_fenced_trainer_deletes_nothing(layout: RunLayout) -> None:
    past_incarnation(layout)
    with pytest.raises(FencedError):
        retire(layout, incarnation=1)
    assert payload(layout) == set(range(STEPS + 1))
    assert retire(layout, incarnation=2) == Retired(0, 2, 3)


def test_a_fenced_trainer_does_not_tidy_up_either(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, "remove_files", 3)
        retire(layout)
    past_incarnation(layout)
    with pytest.raises(FencedError):
        retire(layout, incarnation=1)
    assert 2 in payload(layout)
    assert retire(layout, incarnation=2) is None
    assert 2 not in payload(layout)


def test_a_full_disk_deletes_nothing(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, before_commit: object) -> None:
        raise StorageFullError(f"no space for {path}")

    monkeypatch.setattr(retiring, "create_exclusively", full)
    with pytest.raises(StorageFullError):
        retire(layout)
    assert payload(layout) == set(range(STEPS + 1))


# -- going on without it --------------------------------------------------------------------------------------------


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    """As ``builders.publish`` makes them."""
    weight = torch.arange(256, dtype=torch.float32)
    weight[: version + 1] += version
    return [("w", weight), ("b", torch.tensor([float(version)]))]


def publisher(layout: RunLayout, incarnation: int = 2) -> Publisher:
    return Publisher(layout, incarnation, keyframe_every=3, before_commit=unfenced)


def test_who_needs_a_retired_version_is_told_what_is_kept(layout: RunLayout) -> None:
    retire(layout)
    follower = Follower(layout)
    with pytest.raises(RetiredError, match="version 1 was retired") as caught:
        follower.advance_to(1)
    assert "(3 to 8)" in caught.value.mend
    assert follower.advance_to(3).version == 3


def test_no_way_leads_through_retired_versions(layout: RunLayout) -> None:
    retire(layout)
    (keyframe,) = layout.weights_version(3).glob("keyframe.*")
    flip(keyframe, 100)
    with pytest.raises(CorruptArtefactError, match="version 2 was retired"):
        rebuild(layout, 4)
    assert rebuild(layout, 6).version == 6


def test_a_worker_that_holds_a_retired_version_goes_on_by_another_way(layout: RunLayout) -> None:
    follower = Follower(layout)
    follower.advance_to(1)
    retire(layout)
    assert follower.advance_to(4).version == 4


def test_a_replay_compares_retired_versions_and_leaves_them_retired(layout: RunLayout) -> None:
    """The newest checkpoints are lost: the replay begins at an older one, or at the starting model."""
    retire(layout)
    before = {path: path.read_bytes() for path in layout.weights.rglob("*") if path.is_file()}
    replay = publisher(layout)
    with pytest.raises(CorruptArtefactError):
        replay.seed(0)
    for version in range(STEPS + 1):
        replay.publish(version, tensors(version), {})
    assert {path: path.read_bytes() for path in layout.weights.rglob("*") if path.is_file()} == before
    replay.publish(9, tensors(9), {})
    assert rebuild(layout, 9).manifest.weights_digest == replay.digest_only(tensors(9))


def test_a_replay_that_differs_from_a_retired_version_is_found(layout: RunLayout) -> None:
    retire(layout)
    with pytest.raises(DivergenceError, match="version 1"):
        publisher(layout).publish(1, tensors(2), {})


def test_what_a_worker_needs_of_the_retired_ones_is_published_again_with_all_that_follow(layout: RunLayout) -> None:
    retire(layout)
    digests = [read_manifest(layout, version).weights_digest for version in range(STEPS + 1)]  # type: ignore[union-attr]
    replay = publisher(layout)
    replay.distrust([1])
    for version in range(STEPS + 1):
        replay.publish(version, tensors(version), {})
    assert [is_retired(layout, version) for version in range(4)] == [True, False, False, False]
    for version in range(1, STEPS + 1):
        assert rebuild(layout, version).manifest.weights_digest == digests[version]


def test_a_version_behind_a_retired_one_becomes_a_keyframe(layout: RunLayout) -> None:
    retire(layout)
    durable.remove_tree(layout.weights_version(3))
    replay = Publisher(layout, 2, keyframe_every=100, before_commit=unfenced)
    replay.publish(2, tensors(2), {})
    assert replay.publish(3, tensors(3), {}).keyframe is not None
    assert rebuild(layout, 3).version == 3


# -- the survey -----------------------------------------------------------------------------------------------------


def test_retired_versions_are_neither_broken_nor_the_beginning_of_a_chain(layout: RunLayout) -> None:
    retire(layout)
    found = survey(layout, read_incarnations(layout))
    assert (found.last_version, found.broken) == (STEPS, [])
    for keyframe in layout.weights.glob("00000[36]/keyframe.*"):
        flip(keyframe, 100)
    found = survey(layout, read_incarnations(layout))
    assert found.last_version == 2
    assert {path.parent.name for path, _ in found.broken} == {f"{version:06d}" for version in range(3, STEPS + 1)}


def test_a_retirement_goes_with_its_version(layout: RunLayout) -> None:
    """Else the same version, published again, would be taken for retired."""
    retire(layout)
    layout.batch(2).unlink()
    taken = take_over(layout, Claimant(), {})
    assert taken.record.seal.last_version == 1
    left = {path.relative_to(layout.weights).as_posix() for path in layout.weights.rglob("*.json")}
    assert left == {f"00000{version}/{name}.json" for version in (0, 1) for name in ("manifest", "retired")}


@pytest.mark.parametrize("how", ["flipped", "of another version"])
def test_a_retirement_that_cannot_be_trusted_makes_way_for_another(layout: RunLayout, how: str) -> None:
    retire(layout)
    path = layout.weights_retirement(1)
    if how == "flipped":
        flip(path, 40)
    else:
        path.write_bytes(layout.weights_retirement(2).read_bytes())
    taken = take_over(layout, Claimant(), {})
    assert [Path(name).name for name, _ in taken.quarantined] == ["retired.json"]
    assert taken.found.last_version == STEPS
    assert retire(layout, incarnation=taken.number) == Retired(1, 1, 3)
    assert record(layout, 1).version == 1
