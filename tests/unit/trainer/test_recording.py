"""The moment at which groups get their fates, with twins about."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import (
    commit_batch,
    make_batch,
    make_incarnation,
    make_layout,
    make_ref,
    past_incarnation,
    quarantined,
)

from milesbatch.errors import FencedError
from milesbatch.records import BatchRecord, Seal
from milesbatch.store.durable import AlreadyExistsError, create_exclusively
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.trainer.recording import commit_batch_record


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


def read(layout: RunLayout, step: int) -> BatchRecord:
    return BatchRecord.from_bytes(layout.batch(step).read_bytes(), "p")


def test_commit_and_commit_again(layout: RunLayout) -> None:
    past_incarnation(layout)
    record = make_batch(1, [make_ref(0)])
    for _ in range(2):
        commit_batch_record(layout, record, Fence(layout, 1))
    assert read(layout, 1) == record


def test_a_zombies_record_makes_way(layout: RunLayout) -> None:
    past_incarnation(layout)
    past_incarnation(layout)
    zombie = commit_batch(layout, 1, [make_ref(7)], incarnation=1)
    ours = make_batch(1, [make_ref(0)], incarnation=2)
    commit_batch_record(layout, ours, Fence(layout, 2))
    assert read(layout, 1) == ours
    ((name, reason),) = quarantined(layout).items()
    assert "incarnation 1 wrote it after incarnation 2 had sealed" in reason
    assert BatchRecord.from_bytes((layout.quarantine / name).read_bytes(), "p") == zombie


def test_a_record_within_the_seal_never_makes_way(layout: RunLayout) -> None:
    past_incarnation(layout)
    sealed = commit_batch(layout, 1, [make_ref(7)], incarnation=1)
    past_incarnation(layout)
    with pytest.raises(AlreadyExistsError):
        commit_batch_record(layout, make_batch(1, [make_ref(0)], incarnation=2), Fence(layout, 2))
    assert read(layout, 1) == sealed
    assert quarantined(layout) == {}


def test_a_newer_incarnations_record_stands(layout: RunLayout) -> None:
    newer = commit_batch(layout, 1, [make_ref(7)], incarnation=3)
    with pytest.raises(FencedError, match="incarnation 3"):
        commit_batch_record(layout, make_batch(1, [make_ref(0)], incarnation=2), Fence(layout, 2))
    assert read(layout, 1) == newer


def test_our_own_other_record_stands(layout: RunLayout) -> None:
    ours = commit_batch(layout, 1, [make_ref(7)])
    with pytest.raises(AlreadyExistsError):
        commit_batch_record(layout, make_batch(1, [make_ref(0)]), Fence(layout, 1))
    assert read(layout, 1) == ours


def test_a_fenced_trainer_records_nothing(layout: RunLayout) -> None:
    past_incarnation(layout)
    seal = Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=())
    create_exclusively(layout.incarnation(2), make_incarnation(2, seal=seal).to_bytes())
    with pytest.raises(FencedError):
        commit_batch_record(layout, make_batch(1, [make_ref(0)]), Fence(layout, 1))
    assert list(layout.batches.iterdir()) == []
