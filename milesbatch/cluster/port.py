"""What the controller needs of whatever starts processes: a small protocol with one implementation per place."""

from __future__ import annotations

from typing import Protocol

from milesbatch.cluster.context import RoleContext


class RunningProcess(Protocol):
    """A started role process."""

    def exit_code(self) -> int | None:
        """Exit status; negative is the signal that killed it; None while it runs."""

    def kill(self) -> bool:
        """End it and everything it started, at once, and wait until it is gone; False when that could not be proven: its
        node does not answer, and it may still run."""

    def terminate(self) -> None:
        """Ask it to end."""

    @property
    def pid(self) -> int: ...


class Launcher(Protocol):
    """Starts role processes on some place (this machine, or steps of a Slurm job)."""

    @property
    def address(self) -> str:
        """Under which the processes reach the controller."""

    def has(self, role: str) -> bool:
        """Is there a place for this role? Workers may also join from jobs of their own."""

    def node_of(self, context: RoleContext) -> str:
        """Name of the node that a process belongs to; empty when there is only this machine."""

    def is_lost(self, context: RoleContext) -> bool:
        """Is a process's node known to be down, or does it not respond?"""

    def start(self, context: RoleContext, threads: int) -> RunningProcess: ...
