"""Commit an evaluation: its trajectories, then the record that names them.

    evaluations/000040/….arrow  ──>  evaluations/000040/TAG.json (exclusive: the commit)

Owns the order, and what a file of an evaluation says about itself. Never fenced: an evaluation is a statement about
weights, whose digest it names, and stays true whoever holds the run. Invariant: each (weights, settings) has one record
at most, and a record's file was whole and durable before it.

Crash states: killed before the file is committed, only a ``.tmp-*`` file is left, which the next take-over sweeps.
Killed between file and record, the file is whole and says which evaluation it is of: the next evaluator takes it up
instead of generating again (:func:`finish_evaluation`). A second evaluator at the same time loses at the record and
removes its own file. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from milesbatch.errors import CorruptArtefactError, FormatVersionError, StorageError
from milesbatch.evaluation.figures import figures_of
from milesbatch.records import EvaluationRecord, EvaluationSettings, FileRef, evaluation_tag
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    file_ref,
    make_directory,
    read_optional,
    remove_file,
    storage_error,
)
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.trajectories.schema import FileMetadata, to_table
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.writer import commit_table

KEY_EVALUATION = b"milesbatch.evaluation"
"""In the metadata of an evaluation's file: the tag of its record."""
_TRIES = 3
"""A take-over that happens at this moment sweeps unfinished files, those of a living evaluator too."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an evaluation is about, before anything is known of the answers."""

    version: int
    weights_digest: str
    name: str
    settings: EvaluationSettings

    @property
    def tag(self) -> str:
        return evaluation_tag(self.weights_digest, self.settings)


def commit_evaluation(
    layout: RunLayout, subject: Subject, trajectories: Sequence[Trajectory], metadata: FileMetadata
) -> EvaluationRecord:
    """Commit ``trajectories`` and their record; when another evaluator was first, its record is returned.

    Durability: on return both are durable. If killed midway see the module's crash states.

    Raises:
        ValueError: they are not what the settings ask for, or one is inconsistent.
        StorageError: nothing counts.
    """
    ordered = sorted(trajectories, key=lambda one: (one.group_id, one.sample_index))
    check_samples(subject, ordered)
    for trajectory in ordered:
        trajectory.validate()
    directory = layout.evaluation(subject.version)
    table = to_table(ordered, metadata)
    table = table.replace_schema_metadata({**table.schema.metadata, KEY_EVALUATION: subject.tag.encode()})
    groups = ordered[0].group_id, ordered[-1].group_id
    tries = 1
    while True:
        make_directory(directory)
        try:
            name, ref = commit_table(
                directory, table, groups, ordered[0].incarnation, ordered[0].worker, before_commit=lambda: None
            )
            break
        except StorageError as error:
            if tries == _TRIES or not isinstance(error.__cause__, FileNotFoundError):
                raise
            tries += 1
    record = _commit_record(layout, subject, ref, ordered)
    if record.files != (ref,):
        remove_file(directory / str(name))
    return record


def finish_evaluation(layout: RunLayout, subject: Subject) -> EvaluationRecord | None:
    """Commit the record of an evaluation whose file an evaluator committed before it was killed; None when there is none.

    Raises:
        StorageError: the folder cannot be read, or the record not be written.
    """
    for path in _files(layout.evaluation(subject.version)):
        try:
            if _tag_of(path) != subject.tag:
                continue
            found = read_trajectories(path)
            check_samples(subject, found)
        except (CorruptArtefactError, FormatVersionError, ValueError):
            continue  # an audit names it
        return _commit_record(layout, subject, file_ref(path), found)
    return None


def check_samples(subject: Subject, ordered: Sequence[Trajectory]) -> None:
    """Return only when ``ordered`` are all samples of all prompts, drawn under the one version.

    Raises:
        ValueError: says what differs.
    """
    settings = subject.settings
    wanted = [(group, index) for group in range(settings.num_prompts) for index in range(settings.samples_per_prompt)]
    if [(one.group_id, one.sample_index) for one in ordered] != wanted:
        asked = f"{settings.num_prompts} prompts with {settings.samples_per_prompt} samples each"
        raise ValueError(f"it has {len(ordered)} samples, which are not those of {asked}")
    for one in ordered:
        if any(span.version != subject.version for span in one.versions):
            raise ValueError(f"a token of prompt {one.group_id} is not of policy version {subject.version}")
        if one.versions and one.weights_digest != subject.weights_digest:
            raise ValueError(f"prompt {one.group_id} was answered with weights {one.weights_digest}")


def _commit_record(
    layout: RunLayout, subject: Subject, ref: FileRef, ordered: Sequence[Trajectory]
) -> EvaluationRecord:
    started = min(one.started for one in ordered)
    record = EvaluationRecord(
        version=subject.version,
        weights_digest=subject.weights_digest,
        name=subject.name,
        settings=subject.settings,
        incarnation=ordered[0].incarnation,
        host=socket.gethostname(),
        figures=figures_of(ordered),
        files=(ref,),
        seconds=round((max(one.ended for one in ordered) - started).total_seconds(), 6),
        started_at=started.isoformat(timespec="microseconds").replace("+00:00", "Z"),
    )
    path = layout.evaluation_record(subject.version, subject.tag)
    try:
        create_exclusively(path, record.to_bytes())
    except AlreadyExistsError:
        return EvaluationRecord.from_bytes(read_optional(path) or b"", str(path))
    return record


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _is_payload(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(directory, error) from error


def _is_payload(name: str) -> bool:
    try:
        TrajectoryName.parse(name)
    except ValueError:
        return False
    return True


def _tag_of(path: Path) -> str:
    try:
        with pa.OSFile(str(path)) as stream, pa.ipc.open_file(stream) as source:
            return str((source.schema.metadata or {}).get(KEY_EVALUATION, b"").decode(errors="replace"))
    except (pa.ArrowException, OSError):
        return ""
