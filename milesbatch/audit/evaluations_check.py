"""Evaluations: each record whole, its file what it says, its figures those of the file. They are no training groups.

Owns that walk; never counts what it finds as trajectories or groups of the run. Invariant: nothing that counts depends
on an evaluation, so one of weights that the run does not have (any more) is a note; damage to what was committed is a
violation, and a repair moves it away, so that it can be made again. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.audit.findings import Findings
from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.evaluation.figures import figures_of
from milesbatch.evaluation.writer import Subject, check_samples
from milesbatch.records import EvaluationRecord
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.entries import listed, numbered
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.weights.reader import read_manifest


def check_evaluations(layout: RunLayout, findings: Findings) -> int:
    """Read every file in ``evaluations/``; returns how many evaluations are whole.

    Raises:
        FormatVersionError: one is of a newer format.
    """
    whole = 0
    for version, directory in numbered(layout.evaluations):
        named: set[str] = set()
        for path in listed(directory):
            if path.suffix == ".json" and not path.name.startswith(TEMPORARY_PREFIX):
                whole += _check_record(layout, version, path, named, findings)
        for path in listed(directory):
            if path.suffix != ".json" and not path.name.startswith(TEMPORARY_PREFIX) and path.name not in named:
                _note_unnamed(path, findings)
    return whole


def _check_record(layout: RunLayout, version: int, path: Path, named: set[str], findings: Findings) -> bool:
    """Is it whole? ``named`` gets the files that it names."""
    record = findings.read_record(EvaluationRecord, path, move=path)
    if record is None:
        return False
    named.update(ref.path for ref in record.files)
    if record.version != version or path.stem != record.tag:
        detail = f"it is the evaluation {record.tag} of policy version {record.version}"
        findings.violate("mismatch", path, detail, move=path)
        return False
    if len(record.files) != 1 or not _is_file_name(record.files[0].path):
        findings.violate("mismatch", path, "it must name one trajectory file beside it", move=path)
        return False
    if not _check_file(path, record, findings):
        return False
    _check_version(layout, path, record, findings)
    return True


def _check_file(path: Path, record: EvaluationRecord, findings: Findings) -> bool:
    (ref,) = record.files
    payload = path.parent / ref.path
    try:
        found = read_trajectories(payload, digest=ref.digest)
        check_samples(Subject(record.version, record.weights_digest, record.name, record.settings), found)
        if figures_of(found) != record.figures:
            raise ValueError("its figures are not those of its trajectories")
    except CorruptArtefactError as error:
        findings.violate("damaged" if payload.exists() else "missing", payload, error.what, move=path)
        findings.movable.setdefault(payload, error.what)  # with its record: neither is of use without the other
        return False
    except StorageError as error:
        findings.violate("unreadable", payload, error.what)
        return False
    except ValueError as error:
        findings.violate("mismatch", path, f"{payload.name}: {error}", move=path)
        return False
    findings.count(ref.bytes)
    return True


def _check_version(layout: RunLayout, path: Path, record: EvaluationRecord, findings: Findings) -> None:
    """What is wrong with the version itself is told where versions are checked."""
    try:
        manifest = read_manifest(layout, record.version)
    except (CorruptArtefactError, StorageError):
        return
    if manifest is None:
        findings.note("orphan", path, f"policy version {record.version} is not published (any more)")
    elif manifest.weights_digest != record.weights_digest:
        detail = (
            f"it is of weights {record.weights_digest}; policy version {record.version} has {manifest.weights_digest}"
        )
        findings.note("orphan", path, detail)


def _note_unnamed(path: Path, findings: Findings) -> None:
    if not _is_file_name(path.name):
        findings.note("stranger", path, "it is not a file of an evaluation", move=path)
        return
    detail = (
        "answers whose evaluator was killed before it recorded them; the next evaluation of the version takes them up"
    )
    findings.note("leftover", path, detail, move=path)


def _is_file_name(text: str) -> bool:
    try:
        TrajectoryName.parse(text)
    except ValueError:
        return False
    return True
