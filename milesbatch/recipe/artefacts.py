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
        description="Policy versions from one full copy to the next at most, with deltas between; the next one comes earlier"
        " when these deltas have together become larger than it. 1 writes only full copies; large values make a worker that"
        " starts late apply many deltas.",
    )
    diff_on: Literal["auto", "device", "host"] = Field(
        "auto",
        description="Where the trainer looks for what changed since the version before: `device` keeps that version beside the"
        " training, as two copies of a rank's share in `dtype` while one is published, and sends only changes across the bus;"
        " `host` copies every tensor of every version to host memory; `auto` is `device` where the trainer computes on a GPU,"
        " else `host`. The files are the same, byte for byte. `device` on a CPU costs memory and time, and is for tests.",
    )
    transport: Literal["delta", "broadcast", "both"] = Field(
        "delta",
        description="How a version travels: `delta` as files in the run directory, which workers read; `broadcast` from the"
        " trainer's memory over the network, while the files, which are written all the same, serve whoever was not there or"
        " failed; `both` as `broadcast`, and each worker also builds the version from the files and compares every bit (for"
        " tests and diagnosis). All give the same weights.",
    )
    broadcast_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds that the broadcast of one version may take; a quarter of it may pass until all workers are there."
        " This is what a worker that hangs can cost the others once. Shorter than the bytes need on the network, no version is"
        " ever broadcast and all are read from files.",
    )
    broadcast_bucket_bytes: int = Field(
        64 * 2**20,
        ge=4096,
        description="Bytes that a broadcast sends at once: several small tensors, or a part of a large one. It is the memory"
        " that the trainer needs besides; small values send slowly.",
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
