"""What processes say of themselves in heartbeats, told to people once at each change.

Owns what was told last. Never: decides anything. Invariant: a process that started again, or left, is told of anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from milesbatch.wire.messages import Heartbeat


class PeersWords:
    """The last words of each process."""

    def __init__(self) -> None:
        self.in_trouble: set[str] = set()
        """Names of those that wait for something that a person must mend."""
        self._servers: dict[tuple[str, int], str] = {}

    def changes(self, beats: Mapping[str, Heartbeat]) -> list[str]:
        """What the newest heartbeats of the living (by name) say that those of the last look did not."""
        return [*self._troubles(beats), *self._of_servers(beats)]

    def _troubles(self, beats: Mapping[str, Heartbeat]) -> list[str]:
        in_trouble = {name for name, beat in beats.items() if beat.trouble}
        changed = sorted((in_trouble ^ self.in_trouble) & beats.keys())
        self.in_trouble = in_trouble
        return [
            f"{name}: {beats[name].trouble}" if name in in_trouble else f"{name} goes on: there is space again"
            for name in changed
        ]

    def _of_servers(self, beats: Mapping[str, Heartbeat]) -> list[str]:
        told, self._servers = self._servers, {(name, beat.attempt): beat.servers for name, beat in beats.items()}
        changed = [key for key, text in sorted(self._servers.items()) if text != told.get(key, "")]
        return [f"{name}: {self._servers[name, attempt] or 'its servers work'}" for name, attempt in changed]
