"""Read the evaluations of a run: all of them, one of them, and the curve that they make.

Owns looking, with damaged records told beside the rest. Never changes anything, or proves payload (the audit does).
Invariant: of evaluations with the same settings and version the latest is the one that is shown: a version that was
published again with other weights was evaluated again. The page behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import CorruptArtefactError, InputError, MilesbatchError
from milesbatch.records import EvaluationRecord, evaluation_tag
from milesbatch.store.durable import is_residue, read_optional
from milesbatch.store.entries import listed, numbered
from milesbatch.store.layout import RunLayout

OF_RECIPE = "recipe"
"""Name of evaluations on the prompts of the recipe."""


def evaluated_versions(layout: RunLayout) -> list[int]:
    """Versions with a folder, ascending, from a listing.

    Raises:
        StorageError: it cannot be listed.
    """
    return [version for version, _ in numbered(layout.evaluations)]


def record_paths(layout: RunLayout, version: int) -> list[Path]:
    """Records of one version, by name."""
    paths = listed(layout.evaluation(version))
    return sorted(path for path in paths if path.suffix == ".json" and not is_residue(path.name))


def read_evaluation(path: Path) -> EvaluationRecord:
    """One committed record, which must be about what its name says.

    Raises:
        CorruptArtefactError: damaged, or of another version or other settings.
        FormatVersionError: of a newer format.
    """
    record = EvaluationRecord.from_bytes(read_optional(path) or b"", str(path))
    stated = evaluation_tag(record.weights_digest, record.settings)
    if path.parent.name != f"{record.version:06d}" or path.stem != stated:
        raise CorruptArtefactError(
            f"{path} is the record {stated} of policy version {record.version}",
            mend="run `milesbatch audit` on the run",
        )
    return record


def read_evaluations(layout: RunLayout) -> tuple[list[EvaluationRecord], list[MilesbatchError]]:
    """All readable records by version and time, and an error for each that is not."""
    records, errors = [], []
    try:
        for version in evaluated_versions(layout):
            for path in record_paths(layout, version):
                try:
                    records.append(read_evaluation(path))
                except MilesbatchError as error:
                    errors.append(error)
    except MilesbatchError as error:
        errors.append(error)
    records.sort(key=lambda record: (record.version, record.started_at))
    return records, errors


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations that can be compared: same prompts, same settings; one for each version, ascending."""

    name: str
    settings_digest: str
    points: tuple[EvaluationRecord, ...]

    @property
    def last(self) -> EvaluationRecord:
        return self.points[-1]

    @property
    def best(self) -> EvaluationRecord:
        """The one with the highest mean reward, the earliest of equals; the last one when no reward is known."""
        known = [point for point in self.points if point.figures.reward_mean is not None]
        return max(known, key=lambda point: (point.figures.reward_mean or 0.0, -point.version), default=self.last)


def curves(records: Sequence[EvaluationRecord]) -> list[Curve]:
    """All curves, that of the newest evaluation on the recipe's own prompts first."""
    found: dict[str, dict[int, EvaluationRecord]] = {}
    for record in sorted(records, key=lambda one: one.started_at):
        found.setdefault(record.settings.digest, {})[record.version] = record
    made = [
        Curve(
            max(points.values(), key=lambda one: one.started_at).name,
            digest,
            tuple(v for _, v in sorted(points.items())),
        )
        for digest, points in found.items()
    ]
    newest = {curve.settings_digest: max(point.started_at for point in curve.points) for curve in made}
    made.sort(key=lambda curve: newest[curve.settings_digest], reverse=True)
    made.sort(key=lambda curve: curve.name != OF_RECIPE)
    return made


def main_curve(layout: RunLayout) -> Curve | None:
    """The curve that a run is judged by; None without any evaluation. What cannot be read is left out."""
    found = curves(read_evaluations(layout)[0])
    return found[0] if found else None


def find_evaluation(layout: RunLayout, version: int) -> EvaluationRecord:
    """The evaluation of a version to look at: on the recipe's own prompts if there is one, else the latest.

    Raises:
        InputError: there is none; says which versions have one.
        CorruptArtefactError: its record is damaged.
    """
    records, errors = read_evaluations(layout)
    found = [record for record in records if record.version == version]
    if found:
        return max(found, key=lambda record: (record.name == OF_RECIPE, record.started_at))
    if errors:
        raise errors[0]
    versions = ", ".join(str(number) for number in sorted({record.version for record in records})) or "none"
    raise InputError(
        f"policy version {version} of {layout.root} has not been evaluated",
        mend=f"evaluated are: {versions}; `milesbatch evaluate RUN --version {version}` evaluates it",
    )
