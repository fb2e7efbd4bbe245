"""From a trajectory file to the references that batch records hold: one for each whole group in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from milesbatch.records import GroupRef
from milesbatch.store.durable import digest_file
from milesbatch.trajectories.reader import read_trajectories
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
                version_min=min(versions),
                version_max=max(versions),
                samples=len(samples),
            )
        )
    return tuple(refs)


def group_refs(path: Path) -> tuple[GroupRef, ...]:
    """References to the groups of a committed file, which is verified.

    Raises:
        CorruptArtefactError: the file is damaged.
    """
    return refs_of(read_trajectories(path), path.name, digest_file(path))
