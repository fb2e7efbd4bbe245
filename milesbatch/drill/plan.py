"""Drill plans: which faults go together into one run, and what the drill itself does to it. Pure values, read from YAML.

A plan is either a fault plan (``faults:``, see :mod:`milesbatch.faults.plan`; each fault gets a run of its own) or a list of
``runs:``. Faults happen inside the processes of the run; acts are done to the run from outside. Invariant: names are
unique over the whole plan, for each becomes one line of the verdict. The page behind it is ``docs/drill.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from milesbatch.faults.plan import Fault, FaultPlan, parse, read_yaml

STANDARD = Path(__file__).with_name("standard.yaml")
HOLD_PREFIX = "hold-"

Doing = Literal["power_cut", "kill_controller", "preempt", "second_controller", "flip", "truncate", "zombie"]
Artefact = Literal["weights", "checkpoint", "trajectory", "batch"]


class Act(BaseModel):
    """What the drill does when a process of the run reaches a point. Acts in a row at one point are done together.

    ``power_cut``: SIGKILL to every process at once. ``kill_controller``: to the controller alone. ``preempt``: SIGTERM to the
    controller. ``second_controller``: the same command once more. ``flip``, ``truncate``: a power cut, then the newest
    ``artefact`` is damaged. ``zombie``: the process is stopped exactly at the point, everything else is killed, and it goes
    on as soon as the next incarnation has taken over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    act: Doing
    role: str = "trainer-0"
    point: str = "trainer.recorded"
    nth: int = Field(1, ge=1)
    hold_s: float = Field(8.0, gt=0, le=100)
    """How long the process is held at the point meanwhile."""
    artefact: Artefact | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.act in ("flip", "truncate")) != (self.artefact is not None):
            raise ValueError(f"act {self.act}: `artefact` belongs to `flip` and `truncate`, and only to them")
        self.trigger()
        return self

    @property
    def place(self) -> tuple[str, str, int]:
        return self.role, self.point, self.nth

    @property
    def ends_start(self) -> bool:
        return self.act != "second_controller"

    def trigger(self) -> Fault:
        """The fault that holds or stops the process at the point, for the injector."""
        return Fault(
            name=HOLD_PREFIX + self.name,
            role=self.role,
            point=self.point,
            nth=self.nth,
            action="outlive" if self.act == "zombie" else "delay",
            seconds=self.hold_s,
        )


class DrillRun(BaseModel):
    """One run that is broken: by faults in its processes, and by acts from outside, in this order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    set: tuple[str, ...] = ()
    """Recipe fields of this run, as for ``--set``; only such as do not change what is trained."""
    faults: tuple[Fault, ...] = ()
    acts: tuple[Act, ...] = ()

    @model_validator(mode="after")
    def _breaks_something(self) -> Self:
        if not self.faults and not self.acts:
            raise ValueError("has neither faults nor acts")
        return self

    def steps(self) -> list[tuple[Act, ...]]:
        """The acts, those at one point together."""
        steps: list[tuple[Act, ...]] = []
        for act in self.acts:
            if steps and steps[-1][0].place == act.place:
                steps[-1] = (*steps[-1], act)
            else:
                steps.append((act,))
        return steps

    def fault_plan(self, pending: Sequence[tuple[Act, ...]], zombies: Iterable[str] = ()) -> FaultPlan:
        """What the injector needs in the next start: the faults, and triggers for the acts that can come in it.

        Those after an act that ends the start must wait, or their processes would be held before their turn. While there
        are ``zombies`` the controller is held between its seal and its sweep, which would take their temporary files away:
        when it has committed the record and drops the temporary name.
        """
        triggers = [
            Fault(name=f"slow-{name}", role="controller", point="unlink:incarnations", action="delay", seconds=3.0)
            for name in zombies
        ]
        for step in pending:
            triggers.append(step[0].trigger())
            if any(act.ends_start for act in step):
                break
        return FaultPlan(faults=(*self.faults, *triggers))


class DrillPlan(BaseModel):
    """All runs of a drill."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: tuple[DrillRun, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for what, names in (("run", [run.name for run in self.runs]), ("fault and act", list(self._lines()))):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{what} names must differ; twice: {', '.join(twice)}")
        return self

    def _lines(self) -> Iterator[str]:
        for run in self.runs:
            yield from (fault.name for fault in run.faults)
            yield from (act.name for act in run.acts)


def load_drill_plan(path: Path) -> DrillPlan:
    """Read a drill plan, or a fault plan of which each fault becomes a run.

    Raises:
        InputError: it cannot be read, or asks for what is not possible; names the file, the field and the value.
    """
    document: Any = read_yaml(path)
    if isinstance(document, dict) and "faults" in document:
        faults = parse(FaultPlan, document, path).faults
        document = {"runs": [{"name": fault.name, "faults": [fault.model_dump()]} for fault in faults]}
    return parse(DrillPlan, document, path)
