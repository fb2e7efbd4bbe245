"""From a trajectory file to the references that batch records hold: one for each whole group in it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import GroupRef
from milesbatch.store.durable import digest_file
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.reader import iterate_files, read_trajectories
from milesbatch.trajectories.trajectory import Trajectory


def refs_of(trajectories: Sequence[Trajectory], file_name: str, digest: str) -> tuple[GroupRef, ...]:
    """References to the groups of a file that holds ``trajectories``, in the order of their ids.

    A group in which no sample has a policy token has no versions: -1.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    refs = []
    for group_id, samples in sorted(groups.items()):
        versions = [span.version for sample in samples for span in sample.versions] or [-1]
        refs.append(
            GroupRef(
                group_id=group_id,
                path=file_name,
                digest=digest,
                content=content_digest(samples),
                version_min=min(versions),
                version_max=max(versions),
                samples=len(samples),
            )
        )
    return tuple(refs)


def content_digest(samples: Sequence[Trajectory]) -> str:
    """Digest of what training takes from the samples of one group; free of who made them, where and when.

    Per sample, in order: index, token ids (int32), mask (bytes), logprobs (float32), reward (float64), whether it failed, and
    the runs of policy versions; little-endian, each list preceded by its length.
    """
    hasher = xxhash.xxh3_128()
    for sample in sorted(samples, key=lambda one: one.sample_index):
        versions = [number for span in sample.versions for number in (span.start, span.version)]
        hasher.update(
            struct.pack("<qq?d", sample.sample_index, len(sample.tokens), sample.error is not None, sample.reward)
        )
        hasher.update(np.asarray(sample.tokens, "<i4").tobytes())
        hasher.update(np.asarray(sample.loss_mask, np.uint8).tobytes())
        hasher.update(np.asarray(sample.logprobs, "<f4").tobytes())
        hasher.update(struct.pack(f"<{len(versions) + 1}q", len(versions), *versions))
    return "xxh128:" + hasher.hexdigest()


def replacement(layout: RunLayout, lost: GroupRef) -> GroupRef | None:
    """Another committed file that holds the same content as a group whose own file is lost; None when there is none."""
    for path in iterate_files(layout):
        name = TrajectoryName.parse(path.name)
        if path.name == lost.path or not name.first_group <= lost.group_id <= name.last_group:
            continue
        try:
            found = [ref for ref in group_refs(path) if ref.group_id == lost.group_id and ref.content == lost.content]
        except CorruptArtefactError:
            continue
        if found:
            return found[0]
    return None


def group_refs(path: Path) -> tuple[GroupRef, ...]:
    """References to the groups of a committed file, which is verified.

    Raises:
        CorruptArtefactError: the file is damaged.
    """
    return refs_of(read_trajectories(path), path.name, digest_file(path))
