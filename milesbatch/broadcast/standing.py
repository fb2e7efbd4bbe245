"""Which workers a broadcast is tried with: one that failed sits out, for longer each time. Pure; memory only."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_VERSIONS = 32


class Standing:
    """What the trainer remembers of worker processes (``rollout-0.2``: a new start is another process)."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._barred_until: dict[str, int] = {}
        """First version that it may get again."""

    def may_get(self, process: str, version: int) -> bool:
        """Is it to be asked for a broadcast of ``version``?"""
        return version >= self._barred_until.get(process, version)

    def failed(self, processes: Iterable[str], version: int) -> None:
        """They did not take part, or not to the end: they take this version and 1, 2, 4 … more from files."""
        for process in processes:
            count = self._failures.get(process, 0)
            self._failures[process] = count + 1
            self._barred_until[process] = version + 1 + min(2**count, _LONGEST_VERSIONS)

    def succeeded(self, processes: Iterable[str]) -> None:
        """They confirmed: earlier failures are forgotten."""
        for process in processes:
            self._failures.pop(process, None)
            self._barred_until.pop(process, None)
