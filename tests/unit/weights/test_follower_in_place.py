"""A follower with one copy: no second one while it applies, and nothing half-applied is ever current."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from milesbatch.errors import CorruptArtefactError
from milesbatch.store.layout import RunLayout
from milesbatch.weights import follower as follower_module
from milesbatch.weights.folding import DigestError
from milesbatch.weights.follower import Follower
from milesbatch.weights.publisher import Publisher

Tensors = dict[str, torch.Tensor]
Make = Callable[[int], Tensors]
Damage = Callable[[int, str], Path]
SLACK = 0.25
"""Of the copy: payload, pieces of the passes, and what Python holds besides."""


def holds(follower: Follower, version: int, make: Make) -> None:
    assert follower.current is not None and follower.current.version == version
    found, expected = follower.current.tensors(), make(version)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_reaches_every_version_forward_and_back(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    follower = Follower(layout, in_place=True)
    for version in (0, 1, 2, 5, 6, 4, 4, 0, 6):
        follower.advance_to(version)
        holds(follower, version, version_tensors)


def test_memory_is_one_copy_and_a_little(tmp_path: Path) -> None:
    """The same way without ``in_place`` takes about two: the bound can fail."""
    layout = RunLayout(tmp_path / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    tensors = {f"w{i}": torch.randn(1 << 21).bfloat16() for i in range(8)}
    copy_bytes = sum(tensor.nbytes for tensor in tensors.values())
    publisher = Publisher(layout, 1, keyframe_every=100, before_commit=lambda: None)
    for version in range(3):
        for tensor in tensors.values():
            tensor.view(torch.int16)[version::100] += 1
        publisher.publish(version, tensors.items(), {})
    peaks = {}
    for in_place in (True, False):
        tracemalloc.start()
        follower = Follower(layout, in_place=in_place)
        follower.advance_to(0)
        for version in (1, 2):
            tracemalloc.reset_peak()
            follower.advance_to(version)
        peaks[in_place] = tracemalloc.get_traced_memory()[1] / copy_bytes
        tracemalloc.stop()
        del follower
    assert peaks[True] < 1 + SLACK, peaks
    assert peaks[False] > 1.9, peaks


def test_damage_is_found_before_the_copy_is_touched(
    layout: RunLayout, chain: Publisher, version_tensors: Make, damage: Damage
) -> None:
    follower = Follower(layout, in_place=True)
    follower.advance_to(3)
    damage(4, "delta")
    with pytest.raises(CorruptArtefactError):
        follower.advance_to(5)
    holds(follower, 3, version_tensors)


@pytest.mark.parametrize("where", ["torn", "interrupted"])
def test_a_half_applied_copy_is_never_current(
    layout: RunLayout, chain: Publisher, version_tensors: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is given up; the version comes from a keyframe, and so do later ones until there is a whole copy."""
    follower = Follower(layout, in_place=True)
    before = follower.advance_to(4)
    folded, seen = follower_module.fold, []

    def half(links: Any, tensors: Any, *, owned: bool) -> Any:
        assert owned
        folded(links, tensors, owned=True)
        tensors["layer.weight"].data[7] ^= 1
        seen.append(follower.current)
        if where == "torn":
            raise DigestError("another digest", mend="")
        raise KeyboardInterrupt

    monkeypatch.setattr(follower_module, "fold", half)
    if where == "torn":
        follower.advance_to(5)
    else:
        with pytest.raises(KeyboardInterrupt):
            follower.advance_to(5)
        assert follower.current is None
        monkeypatch.undo()
        follower.advance_to(5)
    assert seen == [None], "nothing is current while it changes"
    holds(follower, 5, version_tensors)
    assert follower.current is not None and follower.current.copy.tensors is not before.copy.tensors


def test_a_copy_that_others_hold_is_not_written_to(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    """What came by broadcast may be taken up once more."""
    giver, follower = Follower(layout), Follower(layout, in_place=True)
    given = giver.advance_to(4).copy
    follower.adopt(given)
    follower.advance_to(5)
    holds(follower, 5, version_tensors)
    holds(giver, 4, version_tensors)
    follower.advance_to(6)
    holds(follower, 6, version_tensors)
