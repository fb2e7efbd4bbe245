"""Restart a role that died, or stop the run? Promise 7: it stops rather than burns.

A role may be restarted ``max_restarts_without_progress`` times without a new train step between; any new step gives all of
them back. A death that no restart can mend (the user's input is wrong) or that must not be mended (fenced) is final at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from milesbatch.errors import EXIT_NO_RESTART, EXIT_USAGE


class Verdict(Enum):
    """What to do about a process that ended."""

    RESTART = "restart"
    STOP_INPUT = "stop: the input is wrong"
    STOP_FENCED = "stop: a newer incarnation has taken over"
    STOP_HOPELESS = "stop: it failed in a way that a restart cannot mend"
    STOP_NO_PROGRESS = "stop: restarts without progress"


@dataclass(slots=True)
class RestartPolicy:
    """Counts restarts of each role since the last progress."""

    max_restarts_without_progress: int
    _since_progress: dict[str, int] = field(default_factory=dict)

    def progressed(self) -> None:
        """A new train step was recorded."""
        self._since_progress.clear()

    def judge(self, role: str, exit_code: int, is_fenced: bool = False) -> Verdict:
        """Decide about a process of ``role`` that ended with ``exit_code`` (negative: killed by that signal)."""
        if is_fenced:
            return Verdict.STOP_FENCED
        if exit_code == EXIT_USAGE:
            return Verdict.STOP_INPUT
        if exit_code == EXIT_NO_RESTART:
            return Verdict.STOP_HOPELESS
        count = self._since_progress.get(role, 0) + 1
        self._since_progress[role] = count
        return Verdict.RESTART if count <= self.max_restarts_without_progress else Verdict.STOP_NO_PROGRESS
