"""The verdict of an audit, and its JSON form. Pure. The page behind it is ``docs/audit.md``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from milesbatch.audit.findings import Finding


@dataclass(frozen=True, slots=True)
class Groups:
    """Counts of prompt groups by what became of them. ``lost`` and ``repeated`` must be 0."""

    trained: int
    rejected: int
    pending: int
    lost: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the files of a run prove."""

    run_id: str | None
    violations: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    groups: Groups
    rejected_by_reason: dict[str, int]
    steps: int
    first_version: int | None
    last_version: int | None
    verified_versions: int
    checkpoints: tuple[int, ...]
    incarnations: int
    trajectories: int
    """Of groups; those of evaluations are not among them."""
    evaluations: int
    generated_again: int
    replayed: tuple[int, ...]
    divergences: tuple[int, ...]
    seconds: dict[str, float]
    files: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.violations

    def to_json(self) -> dict[str, Any]:
        """The document of ``milesbatch audit --json``."""
        return {
            "ok": self.ok,
            "run_id": self.run_id,
            "violations": [asdict(finding) for finding in self.violations],
            "groups": asdict(self.groups),
            "versions": {"first": self.first_version, "last": self.last_version, "verified": self.verified_versions},
            "incarnations": self.incarnations,
            "seconds": self.seconds,
            "steps": self.steps,
            "checkpoints": list(self.checkpoints),
            "trajectories": self.trajectories,
            "evaluations": self.evaluations,
            "rejected": self.rejected_by_reason,
            "work_repeated": {"steps_replayed": len(self.replayed), "groups_generated_again": self.generated_again},
            "divergences": list(self.divergences),
            "notes": [asdict(finding) for finding in self.notes],
            "checked": {"files": self.files, "bytes": self.bytes},
        }
