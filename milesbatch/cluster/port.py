"""What the controller needs of whatever starts processes: a small protocol with one implementation per place."""

from __future__ import annotations

from typing import Protocol

from milesbatch.cluster.context import RoleContext


class RunningProcess(Protocol):
    """A started role process."""

    def exit_code(self) -> int | None:
        """Exit status; negative is the signal that killed it; None while it runs."""

    def kill(self) -> None:
        """End it and everything it started, at once, and wait until it is gone."""

    def terminate(self) -> None:
        """Ask it to end."""

    @property
    def pid(self) -> int: ...


class Launcher(Protocol):
    """Starts role processes on some place (this machine, or steps of a Slurm job)."""

    def start(self, context: RoleContext, threads: int) -> RunningProcess: ...
