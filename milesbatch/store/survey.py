"""What of a run's files counts: the reading side of fencing and the input of a seal. Never writes.

An artefact of incarnation i counts when it is whole and every later incarnation's seal covers it. The survey walks the
batch records (the truth), then the weights, checkpoints and unconsumed trajectories that belong to them, and lists what
must not be used, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from milesbatch.decisions.fates import FateTable
from milesbatch.errors import CorruptArtefactError
from milesbatch.ids import parse_number
from milesbatch.records import (
    BatchRecord,
    CheckpointManifest,
    FileRef,
    IncarnationRecord,
    Record,
    Seal,
    WeightsManifest,
)
from milesbatch.store.durable import digest_file, read_optional, storage_error, verify_file
from milesbatch.store.layout import RunLayout, TrajectoryName

R = TypeVar("R", bound=Record)


@dataclass(slots=True)
class Survey:
    """What counts, and what does not (``broken``: path and reason)."""

    batches: list[BatchRecord] = field(default_factory=list)
    last_version: int = -1
    checkpoints: list[int] = field(default_factory=list)
    ready_files: list[TrajectoryName] = field(default_factory=list)
    broken: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def fates(self) -> FateTable:
        return FateTable.of(self.batches)

    def seal(self) -> Seal:
        return Seal(
            last_batch=len(self.batches),
            last_version=self.last_version,
            checkpoints=tuple(sorted(self.checkpoints)),
            trajectories=tuple(sorted(str(name) for name in self.ready_files)),
        )


def read_incarnations(layout: RunLayout) -> list[IncarnationRecord]:
    """All incarnation records, 1 and up; their names are predicted, not listed.

    Raises:
        CorruptArtefactError: one of them is damaged: who may write can then not be known.
    """
    records: list[IncarnationRecord] = []
    while True:
        path = layout.incarnation(len(records) + 1)
        data = read_optional(path)
        if data is None:
            _refuse_gap(layout, path)
            return records
        record = IncarnationRecord.from_bytes(data, str(path))
        if record.incarnation != len(records) + 1:
            raise CorruptArtefactError(
                f"{path} is the record of incarnation {record.incarnation}", mend="run `milesbatch audit` on the run"
            )
        records.append(record)


def _refuse_gap(layout: RunLayout, missing: Path) -> None:
    """A record above a missing one: who may write, and what the missing seal said, cannot be known."""
    above = [path for number, path in _numbered(layout.incarnations, ".json") if path.name > missing.name]
    if above:
        raise CorruptArtefactError(
            f"{missing} is missing, but {above[0].name} exists: the seals of this run cannot be followed",
            mend="put the file back from a copy of the run; nothing was changed",
        )


def survey(layout: RunLayout, incarnations: Sequence[IncarnationRecord]) -> Survey:
    """Find what counts in a run whose incarnations are ``incarnations``. Reads every file that the next start will use."""
    found = Survey()
    later = Seals(incarnations)
    _survey_batches(layout, later, found)
    _survey_weights(layout, later, found)
    _survey_checkpoints(layout, later, found)
    _survey_trajectories(layout, later, found)
    return found


class Seals:
    """Seals by incarnation, asked: does every incarnation after i cover this?"""

    def __init__(self, incarnations: Sequence[IncarnationRecord]) -> None:
        self._seals = [(record.incarnation, record.seal) for record in incarnations]

    def cover(self, incarnation: int, covers: Callable[[Seal], bool]) -> bool:
        return all(covers(seal) for number, seal in self._seals if number > incarnation)

    def accept_batch(self, record: BatchRecord) -> bool:
        return self.cover(record.incarnation, lambda seal: seal.last_batch >= record.step)

    def accept_weights(self, manifest: WeightsManifest) -> bool:
        return self.cover(manifest.incarnation, lambda seal: seal.last_version >= manifest.version)

    def accept_checkpoint(self, manifest: CheckpointManifest) -> bool:
        return self.cover(manifest.incarnation, lambda seal: manifest.step in seal.checkpoints)

    def accept_trajectories(self, name: TrajectoryName) -> bool:
        """An unconsumed file; one that an accepted batch record consumed counts anyway."""
        return self.cover(name.incarnation, lambda seal: str(name) in seal.trajectories)


def _read(kind: type[R], path: Path, found: Survey) -> R | None:
    if path.is_dir():
        found.broken.append((path, f"{path} is a directory; a record is a file"))
        return None
    data = read_optional(path)
    if data is None:
        return None
    try:
        return kind.from_bytes(data, str(path))
    except CorruptArtefactError as error:
        found.broken.append((path, str(error)))
        return None


def _numbered(directory: Path, suffix: str = "") -> list[tuple[int, Path]]:
    """Entries of a directory named by a number, ascending; others are ignored."""
    entries: list[tuple[int, Path]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not path.name.endswith(suffix):
            continue
        try:
            entries.append((parse_number(path.name.removesuffix(suffix)), path))
        except ValueError:
            continue
    return sorted(entries)


def _survey_batches(layout: RunLayout, later: Seals, found: Survey) -> None:
    fates = FateTable()
    while True:
        step = fates.last_step + 1
        path = layout.batch(step)
        record = _read(BatchRecord, path, found)
        if record is None:
            break
        if not later.accept_batch(record):
            found.broken.append((path, f"written by incarnation {record.incarnation} after it had been sealed"))
            break
        try:
            fates.add(record)
        except CorruptArtefactError as error:
            found.broken.append((path, str(error)))
            break
        found.batches.append(record)
    already = {path for path, _ in found.broken}
    for step, path in _numbered(layout.batches, ".json"):
        if step > fates.last_step and path not in already:
            found.broken.append((path, f"batch record {step} does not follow the unbroken chain 1..{fates.last_step}"))


def _survey_weights(layout: RunLayout, later: Seals, found: Survey) -> None:
    last_batch = len(found.batches)
    good: dict[int, WeightsManifest] = {}
    chain_end = -1
    for version, directory in _numbered(layout.weights):
        path = directory / "manifest.json"
        manifest = _read(WeightsManifest, path, found)
        if manifest is None:
            continue
        reason = None
        if manifest.version != version:
            reason = f"it is the manifest of policy version {manifest.version}"
        elif version > last_batch:
            reason = f"policy version {version} has no batch record"
        elif not later.accept_weights(manifest):
            reason = f"written by incarnation {manifest.incarnation} after it had been sealed"
        elif good and version != chain_end + 1:
            reason = f"policy version {version} does not follow version {chain_end}"
        elif manifest.artefact == "delta" and manifest.parent not in good:
            reason = f"its parent, version {manifest.parent}, is missing"
        if reason is None:
            good[version] = manifest
            chain_end = version
        else:
            found.broken.append((path, reason))
    _verify_newest_chain(layout, good, found)


def _verify_newest_chain(layout: RunLayout, good: dict[int, WeightsManifest], found: Survey) -> None:
    """Check the payload that workers will read: from the newest keyframe on; damage ends the accepted versions there."""
    keyframes = [version for version, manifest in good.items() if manifest.artefact == "keyframe"]
    found.last_version = max(good, default=-1)
    for keyframe in sorted(keyframes, reverse=True):
        whole = keyframe - 1
        for version in range(keyframe, found.last_version + 1):
            directory = layout.weights_version(version)
            reason = _first_damage(directory, good[version].files)
            if reason is not None:
                found.broken.extend(
                    (layout.weights_manifest(v), reason if v == version else f"it follows version {version}: {reason}")
                    for v in range(version, found.last_version + 1)
                )
                break
            whole = version
        found.last_version = whole if whole in good else -1
        if whole >= keyframe:
            return


def _first_damage(directory: Path, files: Iterable[FileRef]) -> str | None:
    try:
        for ref in files:
            verify_file(directory / ref.path, ref)
    except CorruptArtefactError as error:
        return error.what
    return None


def _survey_checkpoints(layout: RunLayout, later: Seals, found: Survey) -> None:
    whole_one_found = False
    for step, directory in reversed(_numbered(layout.checkpoints)):
        path = directory / "manifest.json"
        manifest = _read(CheckpointManifest, path, found)
        if manifest is None:
            continue
        reason = None
        if manifest.step != step:
            reason = f"it is the manifest of checkpoint {manifest.step}"
        elif step > len(found.batches):
            reason = f"checkpoint {step} has no batch record"
        elif not later.accept_checkpoint(manifest):
            reason = f"written by incarnation {manifest.incarnation} after it had been sealed"
        elif not whole_one_found:  # older ones are read in full only when they are needed
            reason = _first_damage(directory, manifest.files)
        if reason is None:
            whole_one_found = True
            found.checkpoints.append(step)
        else:
            found.broken.append((path, reason))
    found.checkpoints.sort()


def _survey_trajectories(layout: RunLayout, later: Seals, found: Survey) -> None:
    fates = found.fates
    consumed = {group.path for record in found.batches for group in record.trained}
    consumed |= {group.path for record in found.batches for group in record.rejected}
    # Where each decided group was read from: a second file of the same groups replaces it only when it is gone.
    homes: dict[int, Path] = {}
    for record in found.batches:
        homes.update({group.group_id: layout.trajectory(group.path) for group in record.trained})
        homes.update({group.group_id: layout.trajectory(group.path) for group in record.rejected})
    blocks: set[int] = set()
    for path in sorted(layout.trajectories.glob("*.arrow")):
        try:
            name = TrajectoryName.parse(path.name)
        except ValueError as error:
            found.broken.append((path, str(error)))
            continue
        groups = range(name.first_group, name.last_group + 1)
        if path.name in consumed and not any(fates.is_pending(group) for group in groups):
            continue
        reason = None
        if path.name not in consumed and not later.accept_trajectories(name):
            reason = f"written by incarnation {name.incarnation} after it had been sealed"
        elif (path.name not in consumed and blocks.intersection(groups)) or (
            path.name not in consumed and not fates.is_pending(groups[0]) and homes[groups[0]].exists()
        ):
            reason = "another file holds the same groups"
        else:
            try:
                content = digest_file(path)
            except FileNotFoundError:
                continue  # its worker has just moved it away: another commit of the block came first
            except OSError as error:
                raise storage_error(path, error) from error
            if content.removeprefix("xxh128:")[:16] != name.tag:
                reason = f"{path} is damaged: its name says {name.tag}, its content is {content}"
        if reason is None:
            found.ready_files.append(name)
            blocks.update(groups)
        else:
            found.broken.append((path, reason))
