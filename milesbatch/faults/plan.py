"""Fault plans: which fault hits which role at which moment. Pure values, read from YAML.

Example::

    faults:
      - {name: record, role: trainer-0, point: trainer.recorded, nth: 3, action: kill}
      - {name: full, role: rollout, point: "sync_file:trajectories", action: enospc, times: 4}
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from milesbatch.errors import InputError
from milesbatch.faults.points import POINTS

P = TypeVar("P", bound=BaseModel)
_MEND = "see docs/faults.md for the form of a fault plan"

OPERATIONS = (
    "create",
    "write",
    "sync_file",
    "sync_directory",
    "link",
    "rename",
    "replace",
    "unlink",
    "make_directory",
    "remove_directory",
)
"""Mutations of files that are points, as in ``store/operations.py``; ``write`` is each write to a new file."""
KINDS = (
    "run",
    "incarnations",
    "trajectories",
    "inflight",
    "batches",
    "weights",
    "checkpoints",
    "evaluations",
    "events",
    "model",
    "quarantine",
)
"""What the file belongs to: its directory in the run; ``run`` is the run directory itself."""

Action = Literal["kill", "stop", "outlive", "exit", "raise", "delay", "enospc", "eio", "flip", "truncate", "partition"]
"""``outlive`` is ``stop``, and the process is no longer killed with its controller: whoever sends it SIGCONT later, when a
newer incarnation is at work, gets a zombie that still wants to write."""
_ON_FILES = ("enospc", "eio", "flip", "truncate")


class Fault(BaseModel):
    """One fault; it fires once in the run's life (``times`` consecutive times for errors), whatever restarts between."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Names the record that the fault has fired."""
    role: str = Field(pattern=r"^(controller|trainer|rollout|tracking|evaluation)(-(0|[1-9][0-9]*))?$")
    """``trainer-0``, or a role for any of its processes: ``controller``, ``trainer``, ``rollout``, ``tracking``,
    ``evaluation``."""
    point: str
    nth: int = Field(1, ge=1)
    """At which passing of the point, counted in the process from its start; later ones when it could not fire there."""
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
        InputError: it cannot be read, or asks for what is not possible; names the file, the field and the value.
    """
    return parse(FaultPlan, read_yaml(path), path)


def read_yaml(path: Path) -> Any:
    """The document in a YAML file.

    Raises:
        InputError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the fault plan {path} cannot be read: {error}", mend=_MEND) from error


def parse(kind: type[P], document: Any, path: Path) -> P:
    """``document`` as a plan, strictly: ``"3"`` and ``true`` are no integers.

    Raises:
        InputError: lists every problem with the field and the value found.
    """
    try:
        return kind.model_validate_json(json.dumps(document), strict=True)
    except (TypeError, ValueError) as error:
        problems = _problems(error) if isinstance(error, ValidationError) else f"  {error}"
        raise InputError(f"the fault plan {path} cannot be used:\n{problems}", mend=_MEND) from error


def _problems(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
        found = "" if isinstance(problem["input"], dict) else f" (found: {problem['input']!r})"
        lines.append(f"  {field or 'plan'}: {problem['msg'].removeprefix('Value error, ')}{found}")
    return "\n".join(lines)
