"""What of a run's files counts: the reading side of fencing and the input of a seal. Never writes.

An artefact of incarnation i counts when it is whole and every later incarnation's seal covers it. The survey walks the
batch records (the truth), then the weights, checkpoints and unconsumed trajectories that belong to them, and lists what
must not be used, with the reason. Names that can be predicted are asked for, whatever a listing says. What must exist by
all that is known and is not there is *unseen*: missing, unless a shared filesystem only shows it late
(``store/sight.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from milesbatch.decisions.fates import FateTable
from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.errors import CorruptArtefactError
from milesbatch.records import (
    BatchRecord,
    CheckpointManifest,
    FileRef,
    IncarnationRecord,
    Record,
    Retirement,
    Seal,
    WeightsManifest,
)
from milesbatch.store.durable import digest_file, ends_with, read_optional, storage_error, verify_files
from milesbatch.store.entries import numbered
from milesbatch.store.layout import TRAJECTORY_END, RunLayout, TrajectoryName
from milesbatch.store.run import read_origin
from milesbatch.store.sight import refresh

R = TypeVar("R", bound=Record)
_NOTHING = Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=())


@dataclass(slots=True)
class Survey:
    """What counts, and what does not (``broken``: path and reason)."""

    origin: Origin = BEGINNING
    batches: list[BatchRecord] = field(default_factory=list)
    last_version: int = -1
    checkpoints: list[int] = field(default_factory=list)
    ready_files: list[TrajectoryName] = field(default_factory=list)
    broken: list[tuple[Path, str]] = field(default_factory=list)
    unseen: list[Path] = field(default_factory=list)
    """What may still appear, and would change what counts."""
    absent: set[Path] = field(default_factory=set)
    """What was asked for and not there; it may be by the end of the survey."""

    @property
    def fates(self) -> FateTable:
        return FateTable.of(self.batches, self.origin)

    @property
    def last_batch(self) -> int:
        """Newest step with a batch record; of a fork without any, the step that it began behind."""
        return self.origin.step + len(self.batches)

    def batch(self, step: int) -> BatchRecord:
        return self.batches[step - 1 - self.origin.step]

    def seal(self) -> Seal:
        return Seal(
            last_batch=self.last_batch,
            last_version=self.last_version,
            checkpoints=tuple(sorted(self.checkpoints)),
            trajectories=tuple(sorted(str(name) for name in self.ready_files)),
        )


def read_incarnations(layout: RunLayout, at_least: int = 0) -> list[IncarnationRecord]:
    """All incarnation records, 1 and up; their names are predicted, not listed.

    ``at_least`` of them are known to exist: without them what a fenced incarnation wrote would seem to count.

    Raises:
        CorruptArtefactError: one of them is damaged or missing: who may write can then not be known.
    """
    records: list[IncarnationRecord] = []
    while True:
        path = layout.incarnation(len(records) + 1)
        data = read_optional(path)
        if data is None:
            if len(records) < at_least:
                raise CorruptArtefactError(
                    f"{path} is missing", mend="put the file back from a copy of the run", unseen=path
                )
            data = _look_again(layout, path)
        if data is None:
            return records
        record = IncarnationRecord.from_bytes(data, str(path))
        if record.incarnation != len(records) + 1:
            raise CorruptArtefactError(
                f"{path} is the record of incarnation {record.incarnation}", mend="run `milesbatch audit` on the run"
            )
        records.append(record)


def _look_again(layout: RunLayout, missing: Path) -> bytes | None:
    """A record above a missing one: who may write, and what the missing seal said, cannot be known. Unless this host only
    remembers that it was missing once."""
    above = [path for number, path in numbered(layout.incarnations, ".json") if path.name > missing.name]
    if not above:
        return None
    refresh(layout.incarnations)
    data = read_optional(missing)
    if data is None:
        raise CorruptArtefactError(
            f"{missing} is missing, but {above[0].name} exists: the seals of this run cannot be followed",
            mend="put the file back from a copy of the run; nothing was changed",
            unseen=missing,
        )
    return data


def survey(
    layout: RunLayout,
    incarnations: Sequence[IncarnationRecord],
    *,
    last_batch: int = 0,
    last_version: int = -1,
    origin: Origin | None = None,
) -> Survey:
    """Find what counts in a run whose incarnations are ``incarnations``. Reads every file that the next start will use.

    Batch records up to ``last_batch`` and versions up to ``last_version`` were committed, as the caller was told. ``origin`` is
    that of the run's record, where the caller has read it: with the patience for a shared filesystem that a survey lacks.
    """
    found = Survey(read_origin(layout) if origin is None else origin)
    later = Seals(incarnations)
    promised = incarnations[-1].seal if incarnations else _NOTHING
    _survey_batches(layout, later, max(promised.last_batch, last_batch), found)
    _survey_weights(layout, later, max(promised.last_version, last_version), found)
    _survey_checkpoints(layout, later, promised.checkpoints, found)
    _survey_trajectories(layout, later, promised.trajectories, found)
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
        found.absent.add(path)
        return None
    try:
        return kind.from_bytes(data, str(path))
    except CorruptArtefactError as error:
        found.broken.append((path, str(error)))
        found.unseen += [error.unseen] if error.unseen is not None else []
        return None


def _damage(directory: Path, files: Sequence[FileRef], found: Survey) -> str | None:
    """What is wrong with the first payload file that is not whole."""
    try:
        verify_files(directory, files)
    except CorruptArtefactError as error:
        found.unseen += [error.unseen] if error.unseen is not None else []
        return error.what
    return None


def _survey_batches(layout: RunLayout, later: Seals, promised: int, found: Survey) -> None:
    fates = FateTable.beginning_at(found.origin)
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
    above = [(n, p) for n, p in numbered(layout.batches, ".json") if n > fates.last_step and p not in already]
    if promised > fates.last_step or above:
        _expect_batch(layout, found)
    for step, path in above:
        chain = f"{found.origin.step + 1}..{fates.last_step}"
        found.broken.append((path, f"batch record {step} does not follow the unbroken chain {chain}"))


def _expect_batch(layout: RunLayout, found: Survey) -> None:
    """Something shows that the next batch record was committed."""
    path = layout.batch(found.last_batch + 1)
    if path not in found.unseen and path in found.absent:
        found.unseen.append(path)


def _versions(layout: RunLayout, found: Survey) -> list[int]:
    """Versions that may exist, ascending: those that follow from the batch records, and what is listed beyond."""
    known = range(found.origin.first_version, found.last_batch + 1)
    return sorted({*known, *(version for version, _ in numbered(layout.weights))})


def _survey_weights(layout: RunLayout, later: Seals, promised: int, found: Survey) -> None:
    last_batch = found.last_batch
    good: dict[int, WeightsManifest] = {}
    chain_end = -1
    for version in _versions(layout, found):
        path = layout.weights_manifest(version)
        manifest = _read(WeightsManifest, path, found)
        if manifest is None:
            continue
        reason = None
        if manifest.version != version:
            reason = f"it is the manifest of policy version {manifest.version}"
        elif not later.accept_weights(manifest):
            reason = f"written by incarnation {manifest.incarnation} after it had been sealed"
        elif version > last_batch:
            reason = f"policy version {version} has no batch record"
            _expect_batch(layout, found)
        elif good and version != chain_end + 1:
            reason = f"policy version {version} does not follow version {chain_end}"
        elif manifest.artefact == "delta" and manifest.parent not in good:
            reason = f"its parent, version {manifest.parent}, is missing"
        if manifest.version == version and later.accept_weights(manifest):
            promised = max(promised, version)  # manifests are never deleted: all before it must be there
        if reason is None:
            good[version] = manifest
            chain_end = version
        else:
            found.broken.append((path, reason))
    first = found.origin.first_version
    expected = (layout.weights_manifest(version) for version in range(first, min(promised, last_batch) + 1))
    found.unseen += [path for path in expected if path in found.absent][:1]
    retired = _survey_retirements(layout, found)
    _verify_newest_chain(layout, good, retired, found)
    # Of a version that does not count, so that one of the same number can be published again.
    found.broken.extend(
        (layout.weights_retirement(version), f"it is of policy version {version}, which does not count")
        for version in sorted(retired)
        if version not in good or version > found.last_version
    )


def _survey_retirements(layout: RunLayout, found: Survey) -> set[int]:
    """Versions whose payload was retired: neither broken, nor the beginning of a chain."""
    retired = set()
    for version in _versions(layout, found):
        path = layout.weights_retirement(version)
        record = _read(Retirement, path, found) if layout.weights_version(version).is_dir() else None
        if record is not None and record.version != version:
            found.broken.append((path, f"it is the retirement of policy version {record.version}"))
        elif record is not None:
            retired.add(version)
    return retired


def _verify_newest_chain(layout: RunLayout, good: dict[int, WeightsManifest], retired: Set[int], found: Survey) -> None:
    """Check the payload that workers will read: from the newest keyframe on; damage ends the accepted versions there.

    Without any whole keyframe the retired versions still count: a replay is compared with them. What a worker needs of them
    is published again (:meth:`milesbatch.weights.publisher.Publisher.distrust`).
    """
    keyframes = [
        version for version, manifest in good.items() if manifest.artefact == "keyframe" and version not in retired
    ]
    found.last_version = max(good, default=-1)
    for keyframe in sorted(keyframes, reverse=True):
        whole = keyframe - 1
        for version in range(keyframe, found.last_version + 1):
            directory = layout.weights_version(version)
            reason = "its payload was retired" if version in retired else _damage(directory, good[version].files, found)
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


def _survey_checkpoints(layout: RunLayout, later: Seals, promised: Sequence[int], found: Survey) -> None:
    whole_one_found = False
    listed = {step for step, _ in numbered(layout.checkpoints)}
    # Newer ones than are listed may be there; older ones may have been retired.
    newer = range(max(listed, default=0) + 1, found.last_batch + 1)
    for step in sorted({*listed, *promised, *newer}, reverse=True):
        directory, path = layout.checkpoint(step), layout.checkpoint_manifest(step)
        manifest = _read(CheckpointManifest, path, found)
        if manifest is None:
            continue
        reason = None
        if manifest.step != step:
            reason = f"it is the manifest of checkpoint {manifest.step}"
        elif not later.accept_checkpoint(manifest):
            reason = f"written by incarnation {manifest.incarnation} after it had been sealed"
        elif step > found.last_batch:
            reason = f"checkpoint {step} has no batch record"
            _expect_batch(layout, found)
        elif not whole_one_found:  # older ones are read in full only when they are needed
            reason = _damage(directory, manifest.files, found)
        if reason is None:
            whole_one_found = True
            found.checkpoints.append(step)
        else:
            found.broken.append((path, reason))
    found.checkpoints.sort()
    newest = layout.checkpoint_manifest(max(promised, default=0))
    if max(promised, default=0) > max(found.checkpoints, default=0) and newest in found.absent:
        found.unseen.append(newest)


def _survey_trajectories(layout: RunLayout, later: Seals, promised: Sequence[str], found: Survey) -> None:
    fates = found.fates
    consumed = {group.path for record in found.batches for group in record.trained}
    consumed |= {group.path for record in found.batches for group in record.rejected}
    # Where each group that was decided here was read from: a second file of the same groups replaces it only when it is gone.
    homes: dict[int, Path] = {}
    for record in found.batches:
        homes.update({group.group_id: layout.trajectory(group.path) for group in record.trained})
        homes.update({group.group_id: layout.trajectory(group.path) for group in record.rejected})
    blocks: set[int] = set()
    paths = {*layout.trajectories.glob("*.arrow"), *(layout.trajectory(name) for name in promised)}
    for path in sorted(paths):
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
            path.name not in consumed and _has_home([g for g in groups if not found.origin.has_decided(g)], homes)
        ):
            reason = "another file holds the same groups"
        else:
            try:
                content = digest_file(path)
            except FileNotFoundError:
                if path.name in promised:
                    found.unseen.append(path)
                continue  # its worker has just moved it away: another commit of the block came first
            except OSError as error:
                raise storage_error(path, error) from error
            if content.removeprefix("xxh128:")[:16] != name.tag:
                reason = f"{path} is damaged: its name says {name.tag}, its content is {content}"
                found.unseen += [] if ends_with(path, TRAJECTORY_END) else [path]
        if reason is None:
            found.ready_files.append(name)
            blocks.update(groups)
        else:
            found.broken.append((path, reason))


def _has_home(groups: Sequence[int], homes: Mapping[int, Path]) -> bool:
    """Was the first of ``groups`` decided, and is the file that it was read from still there?"""
    return bool(groups) and groups[0] in homes and homes[groups[0]].exists()
