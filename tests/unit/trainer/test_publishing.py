"""Where a trainer rank looks for what changed: by the recipe and by where it trains; the files are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_recipe

from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import AT_ONCE
from milesbatch.store.sight import AT_ONCE as SEEN_AT_ONCE
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer.overlap import InBackground
from milesbatch.trainer.publishing import Figures, Publishing
from milesbatch.weights.device_diff import crossed_bytes
from milesbatch.weights.follower import Follower
from milesbatch.weights.reader import read_manifest
from milesbatch.weights.team import Alone

ELEMENTS = 1 << 16


class OneTensor:
    """What of a backend publishing asks for. ``device`` is what it says of itself: its tensors are on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.weight = (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
        self.asked: list[bool] = []

    def move(self, version: int) -> None:
        self.weight.view(torch.int16)[version::100] += 1

    def named_weights(
        self, dtype: torch.dtype, owners: Mapping[str, int] | None = None, *, on_device: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked.append(on_device)
        yield "w", self.weight.to(dtype, copy=True)
        yield "tied", self.weight.to(dtype, copy=True)

    def weight_sizes(self) -> dict[str, int]:
        return {"w": ELEMENTS, "tied": ELEMENTS}

    def tied_names(self) -> dict[str, str]:
        return {"tied": "w"}


class Trainer:
    """One rank that publishes; made again on the same run, it was started again by its controller."""

    def __init__(self, root: Path, backend: OneTensor, **weights: Any) -> None:
        self.layout, self.backend, self.warnings = RunLayout(root), backend, list[tuple[int, str]]()
        for directory in self.layout.directories():
            directory.mkdir(parents=True, exist_ok=True)
        if not self.layout.incarnation(1).exists():
            take_over(self.layout, Claimant(cause="first"), {})
        recipe = make_recipe(weights={"dtype": "bfloat16", "keyframe_every": 100, **weights})
        self.publishing = Publishing(
            self.layout, recipe, Fence(self.layout, 1), backend, Alone(), 1, InBackground(),  # type: ignore[arg-type]
            AT_ONCE, SEEN_AT_ONCE, lambda version, text: self.warnings.append((version, text)),
        )  # fmt: skip

    def step(self, version: int) -> Figures:
        """One step and its version; what is told of it."""
        told: list[Figures] = []
        self.backend.move(version)
        self.publishing.begin(version, moved=True, then=told.append)
        self.publishing.finish()
        return told[0]


@pytest.mark.parametrize(
    ("diff_on", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("host", "cuda", False), ("device", "cpu", True)],
)
def test_the_recipe_and_the_device_decide(tmp_path: Path, diff_on: str, device: str, expected: bool) -> None:
    trainer = Trainer(tmp_path / "run", OneTensor(device), diff_on=diff_on)
    trainer.publishing.publish(0, moved=False)
    crossed = [trainer.step(version)["weights_crossed_bytes"] for version in (1, 2)]
    assert trainer.backend.asked == [expected] * 3
    assert crossed == ([crossed_bytes(656)] * 2 if expected else [2 * ELEMENTS, 2 * ELEMENTS])


def test_both_ways_write_the_same_files_also_over_a_restart(tmp_path: Path) -> None:
    manifests = []
    for way in ("host", "device"):
        backend = OneTensor("cpu")
        first = Trainer(tmp_path / way, backend, diff_on=way)
        first.publishing.publish(0, moved=False)
        for version in (1, 2):
            first.step(version)
        second = Trainer(tmp_path / way, backend, diff_on=way)
        second.publishing.resume_at(2, first.publishing.weights_digest)
        figures = second.step(3)
        assert (figures["weights_crossed_bytes"] < ELEMENTS / 4) == (way == "device")
        found = [read_manifest(first.layout, version) for version in range(4)]
        manifests.append([(m.weights_digest, m.parent, [(f.bytes, f.digest) for f in m.files]) for m in found if m])
        Follower(first.layout).advance_to(3)
    assert manifests[0] == manifests[1]
    assert [parent for _, parent, _ in manifests[0]] == [None, 0, 1, 2]


def test_copies_that_drifted_apart_are_told(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run", OneTensor("cpu"), diff_on="device")
    trainer.publishing.publish(0, moved=False)
    trainer.publishing._publisher.snapshot_tensors["w"].data[77] ^= 1
    trainer.step(1)
    (version, text), *others = trainer.warnings
    assert version == 1 and "tensor w" in text and "full copy" in text and others == []
    trainer.step(2)
    manifest = read_manifest(trainer.layout, 2)
    assert manifest is not None and manifest.parent == 1 and len(trainer.warnings) == 1
    Follower(trainer.layout).advance_to(2)
