"""Recipe sections for what a run writes and keeps: policy versions and checkpoints. Imports without torch.

The page behind it is ``docs/recipe.md``, which is generated from the descriptions here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from milesbatch.recipe.inputs import Section


class Weights(Section):
    """How policy versions reach the rollout group."""

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which the rollout group sees the weights. `bfloat16` halves the bytes of every version and"
        " makes rollout and trainer logprobs differ.",
    )
    keyframe_every: int = Field(
        20,
        ge=1,
        description="Policy versions from one full copy to the next, with deltas between. 1 writes only full copies; large"
        " values make a worker that starts late apply many deltas.",
    )
    transport: Literal["delta"] = Field(
        "delta", description="How a version travels: `delta` writes differences as files in the run directory."
    )
    retire: bool = Field(
        True,
        description="Whether the files of old policy versions are deleted once no kept checkpoint, worker or reader needs"
        " them; their manifests, with all digests, stay. False keeps every version, so that any of them can be"
        " materialized later, and the disk fills with a full copy every `keyframe_every` versions.",
    )


class Checkpoint(Section):
    """When state is saved, and what happens when a replay differs."""

    every: int = Field(
        10,
        ge=1,
        description="Train steps between checkpoints. A restart replays at most this many steps; 1 spends much time on"
        " writing.",
    )
    keep: int = Field(
        2,
        ge=1,
        description="Newest checkpoints that are kept. With 1 a damaged checkpoint means a replay from the very start.",
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="Checkpoints whose step is a multiple of this are kept for ever, beside the newest `keep`; null keeps no"
        " others. Should be a multiple of `every`; small values fill the disk.",
    )
    on_divergence: Literal["adopt", "stop"] = Field(
        "stop",
        description="What happens when a replayed step gives other weights than the published ones: `adopt` goes on from"
        " the replayed ones and records it, `stop` ends the run.",
    )
