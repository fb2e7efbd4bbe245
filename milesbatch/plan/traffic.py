"""Bytes that a step moves, and which transport of weights pays. Pure; what was not measured says so.

Owns the recommendation of ``weights.transport``; never measures. Invariant: it rests on seconds of both ways, or, where a
bandwidth is not known, on the ratio of bandwidths at which the other way would pay, which is said. ``both`` is for diagnosis,
and never recommended: it costs the sum of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milesbatch.plan.memory import BYTES
from milesbatch.plan.model_size import ModelSize
from milesbatch.recipe.models import Recipe

DEFAULT_SHARES: Mapping[str, tuple[float, float]] = {"bfloat16": (0.0015, 0.016), "float32": (0.5, 0.8)}
"""Bytes of a delta over those of a full copy when nothing was measured: 0.3 to 4 % changed elements of BF16
(docs/benchmarks.md); of float32 weights nearly every element changes in every step."""
_TOKEN_BYTES = 14
"""Of a token in a trajectory file: id, logprob, mask, and its part of text and versions."""
_SAMPLE_BYTES = 600


@dataclass(frozen=True, slots=True)
class Measured:
    """What an earlier run of the same model shows."""

    source: str
    delta_share: float
    """Mean bytes of a delta over those of a full copy."""
    changed_share: float | None
    """Mean share of elements whose bits changed."""
    step_s: float | None
    """Mean seconds of a step: waiting, training, publishing."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes in a second; None: not known."""

    filesystem: float | None
    network: float | None


@dataclass(frozen=True, slots=True)
class Transport:
    """A way of weights, in numbers, and the better one."""

    recommended: Literal["delta", "broadcast"]
    reason: str
    delta_bytes: tuple[int, int]
    """Of one version, lowest and highest; equal when measured."""
    broadcast_bytes: int
    delta_s: tuple[float, float] | None
    """Until all workers have read a version; None without the filesystem's bandwidth."""
    broadcast_s: float | None
    pays_above: float
    """Bandwidth of the network over the filesystem's from which on a broadcast is quicker; for the middle of the range."""


def bytes_per_step(recipe: Recipe, size: ModelSize, delta: tuple[int, int]) -> dict[str, int]:
    """Across the filesystem in a mean step; of a range, the middle. Written once; deltas are read by every worker."""
    full = BYTES[recipe.weights.dtype] * size.parameters
    middle = sum(delta) // 2
    is_read = recipe.weights.transport != "broadcast"
    samples = recipe.trainer.groups_per_step * recipe.rollout.samples_per_group
    tokens = min(size.context, 2 * recipe.rollout.sampling.max_new_tokens)
    trajectories = samples * (_SAMPLE_BYTES + _TOKEN_BYTES * tokens)
    return {
        "deltas written": middle,
        "keyframes written": full // recipe.weights.keyframe_every,
        "deltas read by workers": middle * recipe.rollout.workers * is_read,
        "checkpoints written": 12 * size.parameters // recipe.checkpoint.every,
        "trajectories written and read": 2 * trajectories,
    }


def delta_range(recipe: Recipe, size: ModelSize, measured: Measured | None) -> tuple[int, int]:
    """Bytes of a delta, lowest and highest."""
    full = BYTES[recipe.weights.dtype] * size.parameters
    low, high = DEFAULT_SHARES[recipe.weights.dtype]
    if measured is not None:
        low = high = measured.delta_share
    return int(low * full), int(high * full)


def choose_transport(
    recipe: Recipe, size: ModelSize, measured: Measured | None, speeds: Speeds, step_s: float | None
) -> Transport:
    """The transport by which all workers have a version sooner; else files, which are written anyway."""
    full, workers = BYTES[recipe.weights.dtype] * size.parameters, recipe.rollout.workers
    delta = delta_range(recipe, size, measured)
    middle = max(1, sum(delta) // 2)
    pays_above = full / (workers * middle)
    delta_s = broadcast_s = None
    if speeds.filesystem is not None:
        delta_s = (workers * delta[0] / speeds.filesystem, workers * delta[1] / speeds.filesystem)
    if speeds.network is not None:
        broadcast_s = full / speeds.network
    recommended: Literal["delta", "broadcast"] = "delta"
    many = f"{workers} workers read {middle / 1e6:,.1f} MB of delta each" if workers > 1 else (
        f"the worker reads {middle / 1e6:,.1f} MB of delta"
    )  # fmt: skip
    if delta_s is None or broadcast_s is None:
        reason = (
            f"{many}, a broadcast sends {full / 1e6:,.1f} MB once; it would be quicker if the network had more than"
            f" {pays_above:,.1f} times the filesystem's bandwidth, and not both are known"
        )
        return Transport(recommended, reason, delta, full, delta_s, broadcast_s, pays_above)
    middle_s = sum(delta_s) / 2
    window_s = None if step_s is None else step_s * max(recipe.rollout.staleness, 0)
    is_in_time = window_s is not None and window_s > 0 and middle_s < _SMALL * window_s
    if broadcast_s < middle_s and not is_in_time:
        recommended = "broadcast"
    reason = (
        f"{many}: {middle_s:.3g} s at {speeds.filesystem or 0:.3g} bytes/s of the filesystem;"
        f" a broadcast of {full / 1e6:,.1f} MB takes {broadcast_s:.3g} s at {speeds.network or 0:.3g} bytes/s of the network"
    )
    if is_in_time and broadcast_s < middle_s:
        reason += f"; reading is less than {_SMALL:.0%} of the {window_s:.3g} s for which rollout may lag behind"
    return Transport(recommended, reason, delta, full, delta_s, broadcast_s, pays_above)


_SMALL = 0.05
"""Of the time for which a version may be late without anybody waiting: below that, the quicker way gains nothing."""
