"""A process that ends when a test says so."""

from __future__ import annotations

import signal


class EndedByHand:
    """What a launcher gives for a process it started."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def kill(self) -> bool:
        self.code = self.code if self.code is not None else -signal.SIGKILL
        return True

    def terminate(self) -> None:
        """Not asked for here."""
