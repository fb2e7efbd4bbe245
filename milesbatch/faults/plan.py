"""Fault plans: which fault hits which role at which moment. Pure values, read from YAML.

Example::

    faults:
      - {name: record, role: trainer-0, point: trainer.recorded, nth: 3, action: kill}
      - {name: full, role: rollout, point: "sync_file:trajectories", action: enospc, times: 4}
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from milesbatch.errors import InputError
from milesbatch.faults.points import POINTS

OPERATIONS = ("create", "write", "sync_file", "sync_directory", "link", "rename", "replace", "unlink")
"""Mutations of files that are points, as in ``store/operations.py``; ``write`` is each write to a new file."""
KINDS = ("run", "incarnations", "trajectories", "batches", "weights", "checkpoints", "events", "model", "quarantine")
"""What the file belongs to: its directory in the run; ``run`` is the run directory itself."""

Action = Literal["kill", "stop", "exit", "raise", "delay", "enospc", "eio", "flip", "truncate", "partition"]
_ON_FILES = ("enospc", "eio", "flip", "truncate")


class Fault(BaseModel):
    """One fault; it fires once in the run's life (``times`` consecutive times for errors), whatever restarts between."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Names the record that the fault has fired."""
    role: str
    """``trainer-0``, or a role for any of its processes: ``controller``, ``trainer``, ``rollout``."""
    point: str
    nth: int = Field(1, ge=1)
    """At which passing of the point, counted in the process."""
    action: Action
    seconds: float = Field(5.0, ge=0)
    """For ``delay`` and ``partition``."""
    exit_code: int = Field(1, ge=0, le=255)
    times: int = Field(1, ge=1)
    """For ``enospc`` and ``eio``: how many operations in a row fail."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        operation, colon, kind = self.point.partition(":")
        if colon:
            if operation not in OPERATIONS or kind not in KINDS:
                raise ValueError(f"point {self.point!r}: OPERATION is one of {OPERATIONS}, KIND one of {KINDS}")
        elif self.point not in POINTS:
            raise ValueError(f"point {self.point!r} does not exist; there are {', '.join(POINTS)}, and OPERATION:KIND")
        if self.action in _ON_FILES and not colon:
            raise ValueError(f"action {self.action} needs a point OPERATION:KIND, not {self.point!r}")
        if self.action in ("flip", "truncate") and operation != "link":
            raise ValueError(f"action {self.action} damages a committed file: its point must be link:KIND")
        if self.action == "partition" and self.point != "wire.send":
            raise ValueError("action partition needs the point wire.send")
        return self

    def is_for(self, process: str) -> bool:
        """Is the process ``trainer-0`` (say) meant?"""
        return self.role in (process, process.rpartition("-")[0])


class FaultPlan(BaseModel):
    """All faults of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        twice = [name for name, count in Counter(fault.name for fault in self.faults).items() if count > 1]
        if twice:
            raise ValueError(f"fault names must differ; twice: {', '.join(twice)}")
        return self


def load_plan(path: Path) -> FaultPlan:
    """Read a fault plan.

    Raises:
        InputError: it cannot be read, or asks for what is not possible; names the file and the field.
    """
    try:
        return FaultPlan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise InputError(
            f"the fault plan {path} cannot be used: {error}", mend="see docs/faults.md for the form of a fault plan"
        ) from error
