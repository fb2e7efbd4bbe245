"""From recorded groups to samples: the same from the same files, and never from damaged ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from builders import flip, make_batch, make_layout, make_trajectory, write_groups

from milesbatch.engines.protocol import VersionSpan
from milesbatch.errors import CorruptArtefactError
from milesbatch.recipe.models import Algorithm
from milesbatch.store.layout import RunLayout
from milesbatch.trainer.batch import read_groups, sift, step_data
from milesbatch.trajectories.groups import group_refs, refs_of


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


def test_groups_of_several_files(layout: RunLayout) -> None:
    refs = [*write_groups(layout, [0, 1]), *write_groups(layout, [2, 3], version=1)]
    found = read_groups(layout, [refs[3], refs[0]])
    assert sorted(found) == [0, 3]
    assert [(t.group_id, t.sample_index) for t in found[3]] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("how", ["flip", "missing", "other group"])
def test_damaged_files_are_never_trained_on(layout: RunLayout, how: str) -> None:
    (ref,) = write_groups(layout, [0])
    if how == "flip":
        flip(layout.trajectory(ref.path), 300)
    elif how == "missing":
        layout.trajectory(ref.path).unlink()
    else:
        ref = ref.model_copy(update={"group_id": 5})
    with pytest.raises(CorruptArtefactError, match=ref.path):
        read_groups(layout, [ref])


def test_a_file_with_another_digest_than_recorded(layout: RunLayout) -> None:
    first, second = write_groups(layout, [0])[0], write_groups(layout, [0], worker="rollout-1")[0]
    with pytest.raises(CorruptArtefactError):
        read_groups(layout, [first.model_copy(update={"digest": second.digest})])


def test_references_say_which_versions_made_a_group() -> None:
    mixed = make_trajectory(1, 1, versions=(VersionSpan(2, 3), VersionSpan(4, 5)))
    mute = dataclasses.replace(
        make_trajectory(2), loss_mask=(False,) * 5, logprobs=(0.0,) * 5, versions=(), prompt_tokens=5, response_tokens=0
    )
    mute.validate()
    refs = refs_of([mute, mixed, make_trajectory(1, 0, 4)], "f", "d")
    assert [(r.group_id, r.version_min, r.version_max, r.samples) for r in refs] == [(1, 3, 5, 2), (2, -1, -1, 1)]
    assert {(r.path, r.digest) for r in refs} == {("f", "d")}


def test_references_of_a_damaged_file(layout: RunLayout) -> None:
    (ref,) = write_groups(layout, [0])
    assert group_refs(layout.trajectory(ref.path)) == (ref,)
    flip(layout.trajectory(ref.path), 300)
    with pytest.raises(CorruptArtefactError):
        group_refs(layout.trajectory(ref.path))


def test_sift() -> None:
    trajectories = {
        0: [make_trajectory(0, sample) for sample in range(3)],
        1: [make_trajectory(1, sample, reward=1.0) for sample in range(3)],
        2: [make_trajectory(2, sample, error="broke" if sample else None) for sample in range(3)],
        3: [make_trajectory(3, sample, error="broke" if sample == 2 else None) for sample in range(3)],
    }
    candidates = refs_of([row for rows in trajectories.values() for row in rows], "f", "d")
    trained, rejected = sift(candidates, trajectories, Algorithm())
    assert [group.group_id for group in trained] == [0, 1, 3]
    assert [(r.group_id, r.reason) for r in rejected] == [(2, "failed")]
    trained, rejected = sift(candidates, trajectories, Algorithm(group_filter="zero_variance"))
    assert [group.group_id for group in trained] == [0, 3]
    assert [(r.group_id, r.reason) for r in rejected] == [(1, "zero_variance"), (2, "failed")]


def test_step_data_leaves_failed_samples_out() -> None:
    rows = [make_trajectory(0, 0, 1), make_trajectory(0, 1, 2), make_trajectory(0, 2, 2, error="broke", reward=0.0)]
    record = make_batch(3, refs_of(rows, "f", "d"))
    data = step_data(record, {0: rows}, Algorithm(), temperature=0.7)
    assert [sample.key for sample in data.samples] == [(0, 0), (0, 1)]
    assert sum(sample.advantage for sample in data.samples) == pytest.approx(0)
    assert data.samples[1].advantage > 0
    assert {sample.temperature for sample in data.samples} == {0.7}
    assert data.metrics["reward_mean"] == 0.5
    assert data.metrics["failed"] == 1
    assert data.metrics["reward/answer"] == 0.5
    assert (data.metrics["lag_max"], data.metrics["lag_mean"]) == (1.0, pytest.approx(1 / 3))


def test_lag_counts_the_tokens_of_each_version() -> None:
    row = make_trajectory(0, 0, versions=(VersionSpan(2, 0), VersionSpan(4, 2)))
    data = step_data(make_batch(3, refs_of([row], "f", "d")), {0: [row]}, Algorithm(), 1.0)
    assert data.metrics["lag_mean"] == pytest.approx((2 * 2 + 1 * 0) / 3)
    assert data.metrics["lag_max"] == 2.0


def test_a_step_of_nothing() -> None:
    data = step_data(make_batch(1, []), {}, Algorithm(), 1.0)
    assert data.samples == ()
    assert data.metrics["reward_mean"] == data.metrics["lag_max"] == data.metrics["truncated_share"] == 0.0


def test_the_same_files_give_the_same_samples(layout: RunLayout) -> None:
    refs = write_groups(layout, [0, 1, 2, 3], samples=4)
    record = make_batch(1, refs)
    first, second = (step_data(record, read_groups(layout, refs), Algorithm(), 1.0) for _ in range(2))
    assert first == second
    backwards = step_data(record, read_groups(layout, tuple(reversed(refs))), Algorithm(), 1.0)
    assert backwards == first
