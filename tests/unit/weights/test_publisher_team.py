"""One version written by several ranks: the same digests, files of shares, a rank that dies in the middle, a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from milesbatch.decisions.shares import shares
from milesbatch.errors import DivergenceError
from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.draft import left_there, owned
from milesbatch.weights.follower import Follower
from milesbatch.weights.listing import verify
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import keyframe_refs, read_manifest
from milesbatch.weights.rebuild import rebuild
from milesbatch.weights.reference import read_version

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Make = Callable[[int], Tensors]
VERSIONS = 5


class Meeting:
    """Ranks as threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size), [Any] * size

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self._meeting = rank, meeting

    def all_of(self, value: T) -> list[T]:
        self._meeting.barrier.wait(20)
        self._meeting.values[self.rank] = value  # type: ignore[call-overload]
        self._meeting.barrier.wait(20)
        found: list[T] = list(self._meeting.values)  # type: ignore[arg-type]
        self._meeting.barrier.wait(20)
        return found


class Ranks:
    """The publishers of a trainer's ranks, each with its share."""

    def __init__(self, layout: RunLayout, size: int, incarnation: int = 1, **options: Any) -> None:
        meeting = Meeting(size)
        self.size, self.barrier = size, meeting.barrier
        self.publishers = [
            Publisher(
                layout,
                incarnation,
                team=meeting.seat(rank),
                **{"keyframe_every": 3, "before_commit": lambda: None, **options},
            )
            for rank in range(size)
        ]

    def together(self, action: Callable[[int, Publisher], T]) -> list[T]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self._guarded(action), range(self.size), self.publishers))

    def _guarded(self, action: Callable[[int, Publisher], T]) -> Callable[[int, Publisher], T]:
        def guarded(rank: int, publisher: Publisher) -> T:
            try:
                return action(rank, publisher)
            except BaseException:
                self.barrier.abort()  # the death of one is the death of all
                raise

        return guarded

    def share(self, rank: int, tensors: Tensors) -> Tensors:
        owners = shares({name: t.numel() * t.element_size() for name, t in tensors.items()}, self.size)
        return {name: tensor.clone() for name, tensor in tensors.items() if owners[name] == rank}

    def publish(self, version: int, tensors: Tensors, *, on_device: bool = False) -> WeightsManifest:
        def one(rank: int, publisher: Publisher) -> WeightsManifest:
            take = left_there if on_device else owned
            return publisher.publish_share(version, take(self.share(rank, tensors).items(), {}), {})

        manifests = self.together(one)
        assert all(manifest == manifests[0] for manifest in manifests), "all ranks know what was committed"
        return manifests[0]

    def resume(self, version: int, tensors: Tensors) -> bool:
        found = self.together(lambda rank, one: one.resume(version, owned(self.share(rank, tensors).items(), {})))
        assert len(set(found)) == 1
        return found[0]


def bytes_of(tensors: Tensors) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_the_digest_does_not_depend_on_the_number_of_ranks(
    tmp_path: Path, layout: RunLayout, chain: Publisher, version_tensors: Make, size: int
) -> None:
    """``chain`` is what one publisher wrote of the same versions."""
    parted = RunLayout(tmp_path / "parted")
    ranks = Ranks(parted, size)
    for version in range(VERSIONS):
        manifest = ranks.publish(version, version_tensors(version))
        alone = read_manifest(layout, version)
        assert alone is not None
        assert (manifest.weights_digest, manifest.artefact, manifest.parent) == (
            alone.weights_digest,
            alone.artefact,
            alone.parent,
        )
        assert [(e.name, e.digest, e.encoding, e.changed) for e in manifest.tensors] == [
            (e.name, e.digest, e.encoding, e.changed) for e in alone.tensors
        ]
        if size == 1:
            assert manifest.files == alone.files
        copy = rebuild(parted, version)
        assert {name: tensor.data.tobytes() for name, tensor in copy.tensors.items()} == bytes_of(
            version_tensors(version)
        )
        assert {n: d.tobytes() for n, d in read_version(parted.root, version).items()} == bytes_of(
            version_tensors(version)
        )
    assert not list(verify(parted))
    full = keyframe_refs(read_manifest(parted, 3) or pytest.fail("version 3"))
    assert len(full) == min(size, len(version_tensors(3)))


def test_each_rank_writes_what_it_owns(layout: RunLayout, version_tensors: Make) -> None:
    ranks = Ranks(layout, 3)
    manifest = ranks.publish(0, version_tensors(0))
    by_file: dict[str | None, set[str]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, set()).add(entry.name)
    assert sorted(map(sorted, by_file.values())) == sorted(
        sorted(ranks.share(rank, version_tensors(0))) for rank in range(3)
    )
    for rank, publisher in enumerate(ranks.publishers):
        assert set(publisher.snapshot_tensors) == set(ranks.share(rank, version_tensors(0)))


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_rank_that_dies_in_the_middle(
    layout: RunLayout, version_tensors: Make, monkeypatch: pytest.MonkeyPatch, dying: int
) -> None:
    """The others' files stay, nobody's snapshot advances, and the second attempt commits its own and removes them."""
    first = Ranks(layout, 3, keyframe_every=100)
    first.publish(0, version_tensors(0))
    written = Publisher._write_files
    others = version_tensors(1)
    others["scalar"] += 5  # the first attempt was of other weights: nothing of it may be in what counts
    wrote = threading.Semaphore(0)

    def die(self: Publisher, version: int, *rest: Any) -> Any:
        if self is first.publishers[dying]:
            for _ in range(2):
                assert wrote.acquire(timeout=20)
            raise KeyboardInterrupt
        result = written(self, version, *rest)
        wrote.release()
        return result

    monkeypatch.setattr(Publisher, "_write_files", die)
    with pytest.raises((KeyboardInterrupt, threading.BrokenBarrierError)):
        first.publish(1, others)
    monkeypatch.undo()
    assert [publisher.snapshot_version for publisher in first.publishers] == [0, 0, 0]
    orphans = set(layout.weights_version(1).glob("*.safetensors"))
    assert orphans and read_manifest(layout, 1) is None
    second = Ranks(layout, 3, incarnation=2, keyframe_every=100)
    assert second.resume(0, version_tensors(0))
    manifest = second.publish(1, version_tensors(1))
    assert (manifest.parent, manifest.incarnation) == (0, 2)
    assert {path.name for path in layout.weights_version(1).glob("*.safetensors")} == {
        ref.path for ref in manifest.files
    }
    follower = Follower(layout)
    follower.advance_to(0)
    assert follower.advance_to(1).weights_digest == manifest.weights_digest
    assert not list(verify(layout))


def test_two_attempts_of_one_version_never_mix(layout: RunLayout, version_tensors: Make) -> None:
    """The slower one finds the version committed, by the other's files, and compares."""
    quick, slow = Ranks(layout, 2, incarnation=2), None
    other = version_tensors(0)
    other["scalar"] += 1

    def before_commit() -> None:
        quick.publish(0, version_tensors(0))

    slow = Ranks(layout, 2, incarnation=1, before_commit=before_commit)
    with pytest.raises(DivergenceError, match="incarnation 2"):
        slow.publish(0, other)
    assert rebuild(layout, 0).manifest.incarnation == 2
    assert not list(verify(layout))


def test_a_restart_goes_on_with_a_delta_only_from_the_very_weights(layout: RunLayout, version_tensors: Make) -> None:
    Ranks(layout, 2, keyframe_every=100).publish(0, version_tensors(0))
    other = version_tensors(0)
    other["scalar"] += 1
    ranks = Ranks(layout, 2, incarnation=2, keyframe_every=100)
    assert not ranks.resume(0, other)
    assert not ranks.resume(1, version_tensors(1)), "not published"
    fewer = version_tensors(0)
    del fewer["frozen"]
    assert not ranks.resume(0, fewer)
    assert ranks.publish(1, version_tensors(1)).parent is None
    again = Ranks(layout, 2, incarnation=3, keyframe_every=100)
    assert again.resume(1, version_tensors(1))
    assert again.publish(2, version_tensors(2)).parent == 1


def test_a_restart_from_a_damaged_version_writes_a_keyframe(layout: RunLayout, version_tensors: Make) -> None:
    Ranks(layout, 2, keyframe_every=100).publish(0, version_tensors(0))
    victim = sorted(layout.weights_version(0).glob("*.safetensors"))[1]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    ranks = Ranks(layout, 2, incarnation=2, keyframe_every=100)
    assert not ranks.resume(0, version_tensors(0))
    assert ranks.publish(1, version_tensors(1)).parent is None


def test_a_lost_version_is_published_again_by_all(layout: RunLayout, version_tensors: Make) -> None:
    ranks = Ranks(layout, 2, keyframe_every=100)
    for version in range(3):
        manifest = ranks.publish(version, version_tensors(version))
    for path in layout.weights_version(2).glob("*.safetensors"):
        path.unlink()
    assert not ranks.publishers[0].can_rebuild(2)
    again = ranks.together(lambda rank, publisher: publisher.republish())
    assert again[0] == again[1] and again[0] is not None
    assert (again[0].weights_digest, again[0].artefact) == (manifest.weights_digest, "keyframe")
    assert ranks.publish(3, version_tensors(3)).parent == 2
    assert rebuild(layout, 3).version == 3


def test_copies_that_drifted_apart_at_one_rank_make_all_write_a_full_copy(
    layout: RunLayout, version_tensors: Make
) -> None:
    """Shares stay on the device; a bit of one rank's host copy flips."""
    ranks = Ranks(layout, 2, keyframe_every=100)
    for version in range(2):
        assert ranks.publish(version, version_tensors(version), on_device=True).parent == (
            version - 1 if version else None
        )
    (unlucky,) = (rank for rank in range(2) if "layer.weight" in ranks.share(rank, version_tensors(0)))
    ranks.publishers[unlucky].snapshot_tensors["layer.weight"].data[99] ^= 2
    assert ranks.publish(2, version_tensors(2), on_device=True).parent is None
    assert [len(publisher.drifts) for publisher in ranks.publishers] == [rank == unlucky for rank in range(2)]
    assert ranks.publish(3, version_tensors(3), on_device=True).parent == 2
    assert bytes_of(version_tensors(3)) == {n: t.data.tobytes() for n, t in rebuild(layout, 3).tensors.items()}
    assert not list(verify(layout))


def test_shares_are_whole_and_balanced() -> None:
    sizes = {"embed": 500, **{f"layer{i}": 100 + i for i in range(10)}, "norm": 0}
    for ranks in (1, 2, 3, 20):
        owners = shares(sizes, ranks)
        assert set(owners) == set(sizes) and set(owners.values()) <= set(range(ranks))
        loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(ranks)]
        assert max(loads) <= max(500, sum(sizes.values()) / ranks + 110)
        assert owners == shares(dict(reversed(sizes.items())), ranks)
    with pytest.raises(ValueError, match="at least 1"):
        shares(sizes, 0)
