"""What a probe found, and what that means. Values only; pure.

Invariant: what was not checked is said to be not checked; it is never counted as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Level(Enum):
    """How it is with one thing."""

    OK = "ok"
    WARN = "warn"
    """Runs work, but slower, later or with less safety than they could."""
    BAD = "bad"
    """Runs fail, or lose what they promise to keep."""
    UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    area: str
    """``python``, ``machine``, ``filesystem``, ``slurm`` or ``nodes``."""
    name: str
    level: Level
    found: str
    """What is there, with figures; for what was not checked: why not."""
    meaning: str = ""
    mend: str = ""

    def to_json(self) -> dict[str, Any]:
        keys = ("area", "name", "found", "meaning", "mend")
        return {**{key: getattr(self, key) for key in keys}, "level": self.level.value}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Check:
        """Inverse of ``to_json``.

        Raises:
            KeyError, ValueError: it is not one.
        """
        texts = (str(body[key]) for key in ("found", "meaning", "mend"))
        return cls(str(body["area"]), str(body["name"]), Level(body["level"]), *texts)


def ok(area: str, name: str, found: str) -> Check:
    return Check(area, name, Level.OK, found)


def warn(area: str, name: str, found: str, meaning: str, mend: str) -> Check:
    return Check(area, name, Level.WARN, found, meaning, mend)


def bad(area: str, name: str, found: str, meaning: str, mend: str) -> Check:
    return Check(area, name, Level.BAD, found, meaning, mend)


def unchecked(area: str, name: str, why: str, mend: str = "") -> Check:
    return Check(area, name, Level.UNCHECKED, why, mend=mend)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one visit."""

    checks: tuple[Check, ...]

    @property
    def is_fit(self) -> bool:
        """Nothing is bad. Warnings, and what could not be checked, are for people to weigh."""
        return not self.of(Level.BAD)

    def of(self, level: Level) -> Sequence[Check]:
        return [check for check in self.checks if check.level is level]

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.is_fit,
            "checks": [check.to_json() for check in self.checks],
            "not_checked": [f"{check.area}: {check.name}" for check in self.of(Level.UNCHECKED)],
        }
