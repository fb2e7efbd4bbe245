"""How long training stands still for publishing: beside the next step, against before it. One rank, both ways in turns.

    python benchmarks/publish_stall.py [--mb 256] [--versions 6] [--tensor-mb 8]

Prints the median stall of a step each way, their ratio, and by how much the steps beside which something is published take
longer. A step is a fixed amount of matrix products. Per version 1 % of the BF16 elements move by one unit in the last place.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from milesbatch.recipe.load import load_recipe
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import AT_ONCE
from milesbatch.store.sight import AT_ONCE as SEEN_AT_ONCE
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer.overlap import InBackground
from milesbatch.trainer.publishing import Publishing
from milesbatch.weights.team import Alone

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"


class Weights:
    """BF16 tensors of one size; what of a backend a publisher asks for."""

    device = torch.device("cpu")

    def __init__(self, num_bytes: int, tensor_bytes: int) -> None:
        made, size = torch.Generator().manual_seed(0), tensor_bytes // 2
        count = max(1, num_bytes // tensor_bytes)
        self.tensors = {f"w{i}": (torch.randn(size, generator=made) * 0.02).bfloat16() for i in range(count)}

    def move(self, version: int) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.int16)[version % 100 :: 100] += 1

    def named_weights(
        self, dtype: torch.dtype, owners: Mapping[str, int] | None = None, *, on_device: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(dtype, copy=True)

    def weight_sizes(self) -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in self.tensors.items()}

    def tied_names(self) -> dict[str, str]:
        return {}


def step(products: int, size: int = 768) -> float:
    """A train step's work; seconds."""
    began_s = time.perf_counter()
    left, right = torch.full((size, size), 0.5), torch.full((size, size), 0.5)
    for _ in range(products):
        torch.mm(left, right)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--tensor-mb", type=int, default=8, help="MiB of one tensor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        layout = RunLayout(Path(place) / "run")
        for directory in layout.directories():
            directory.mkdir(parents=True)
        backend: Any = Weights(options.mb * 1_000_000, options.tensor_mb << 20)
        recipe = load_recipe(RECIPE, ["weights.dtype=bfloat16", "weights.keyframe_every=1000"])
        incarnation = take_over(layout, Claimant(cause="first"), {}).number
        publishing = Publishing(
            layout, recipe, Fence(layout, incarnation), backend, Alone(), 1, InBackground(), AT_ONCE, SEEN_AT_ONCE,
            lambda version, text: None,
        )  # fmt: skip
        publishing.publish(0, moved=False)
        products = max(1, round(20 / step(20)))  # about a second
        stalls: dict[bool, list[float]] = {True: [], False: []}
        steps: dict[bool, list[float]] = {True: [], False: []}
        version = 0
        for _ in range(options.versions):
            for waits in (True, False):
                version += 1
                backend.move(version)
                began_s = time.perf_counter()
                publishing.begin(version, moved=True, then=lambda figures: None, waits=waits)
                if waits:
                    publishing.finish()
                stalls[waits].append(time.perf_counter() - began_s)
                steps[waits].append(step(products))
                publishing.finish()
        before, beside = (statistics.median(stalls[waits]) for waits in (True, False))
        slower = statistics.median(steps[False]) / statistics.median(steps[True])
        num_bytes = sum(tensor.nbytes for tensor in backend.tensors.values())
        print(f"publishing {num_bytes / 1e6:.0f} MB of BF16 weights, 1 % changed, {options.versions} versions each way")
        print(f"  before the next step  training stands still for {before:.3f} s")
        print(f"  beside the next step  training stands still for {beside:.3f} s")
        print(f"  ratio {beside / before:.3f}; the step beside it takes {slower:.2f} times as long")


if __name__ == "__main__":
    main()
