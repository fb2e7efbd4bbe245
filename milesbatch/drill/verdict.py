"""The verdict of a drill, and its JSON form. Pure. The page behind it is ``docs/drill.md``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """One fault: what it did, and whether every promise held."""

    fault: str
    run: str
    what: str
    """In words, for people."""
    fired: bool
    detected_s: float | None
    resumed_s: float | None
    steps_replayed: int
    groups_lost: int
    groups_repeated: int
    groups_generated_again: int
    """Of the whole run, as the next three."""
    digest_equal: bool | None
    audit_ok: bool | None
    starts: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.fired and not self.problems

    @property
    def word(self) -> str:
        """``good``, ``did not fire``, or ``BROKEN``."""
        return "good" if self.ok else "BROKEN" if self.fired else "did not fire"


@dataclass(frozen=True, slots=True)
class DrillVerdict:
    """All faults of a drill."""

    recipe: str
    changes: tuple[str, ...]
    """What was changed to make the recipe small."""
    steps: int
    is_bitwise: bool
    weights_digest: str | None
    """Of the unbroken run's last version."""
    unbroken_problems: tuple[str, ...]
    faults: tuple[FaultVerdict, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.unbroken_problems and bool(self.faults) and all(fault.ok for fault in self.faults)

    def to_json(self) -> dict[str, Any]:
        """The document of ``milesbatch drill --json``."""
        faults = [{**asdict(fault), "problems": list(fault.problems), "ok": fault.ok} for fault in self.faults]
        return {
            "ok": self.ok,
            "faults": faults,
            "recipe": self.recipe,
            "small_form": list(self.changes),
            "steps": self.steps,
            "determinism": "bitwise" if self.is_bitwise else "relaxed",
            "unbroken": {"weights_digest": self.weights_digest, "problems": list(self.unbroken_problems)},
            "seconds": round(self.seconds, 1),
        }
