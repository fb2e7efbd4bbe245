"""The second of two nodes: does what the first one asks, and says what it sees of the shared directory.

Owns: looking, with its own clock. Never: what that means. Invariant: every look ends within the time that it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milesbatch.doctor.child import run_probe
from milesbatch.doctor.facts import node_facts
from milesbatch.doctor.link import Link
from milesbatch.records import digest_bytes
from milesbatch.store.durable import AlreadyExistsError, create_exclusively, read_optional
from milesbatch.store.sight import refresh

_REFRESH_S = 1.0
_LONGEST_S = 150.0


class Servant:
    """Answers questions about one directory."""

    def __init__(self, directory: Path, address: str) -> None:
        """``address`` is the one under which the other node was reached."""
        self._directory = directory
        self._address = address

    def serve(self, link: Link) -> None:
        """Until the other node says ``bye``.

        Raises:
            LinkError: it went away before.
        """
        while True:
            asked = link.receive(_LONGEST_S)
            what = asked.pop("do")
            if what == "bye":
                link.send({})
                return
            link.send(getattr(self, f"do_{what}")(**asked))

    def do_facts(self) -> dict[str, Any]:
        return node_facts()

    def do_address_of_examiner(self) -> dict[str, Any]:
        return {"address": self._address}

    def do_clock(self) -> dict[str, Any]:
        return {"now_s": time.time()}

    def do_is_missing(self, name: str) -> dict[str, Any]:
        """Look for a name before it is there: hosts remember what was missing, too."""
        return {"is_missing": read_optional(self._directory / name) is None}

    def do_wait_for(self, name: str, digest: str, limit_s: float) -> dict[str, Any]:
        """Until a file has its content."""

        def is_there() -> bool:
            data = read_optional(self._directory / name)
            return data is not None and digest_bytes(data) == digest

        return self._until(is_there, limit_s)

    def do_wait_gone(self, name: str, limit_s: float) -> dict[str, Any]:
        return self._until(lambda: read_optional(self._directory / name) is None, limit_s)

    def do_list(self) -> dict[str, Any]:
        return {"names": sorted(path.name for path in self._directory.iterdir())}

    def do_wait_listed(self, name: str, limit_s: float) -> dict[str, Any]:
        """Without asking the filesystem to look again: that is what listings are without help."""
        return self._until(lambda: name in self.do_list()["names"], limit_s, helped=False)

    def do_create(self, name: str, content: str) -> dict[str, Any]:
        return {"won": creates(self._directory / name, content)}

    def do_read(self, name: str) -> dict[str, Any]:
        data = read_optional(self._directory / name)
        return {"content": None if data is None else data.decode(errors="replace")}

    def do_collective(self, arguments: list[str], timeout_s: float) -> dict[str, Any]:
        """Take part in a collective of both nodes."""
        answer = run_probe("collective", arguments, timeout_s)
        return answer.body if answer.body is not None else {"error": answer.error}

    def _until(self, is_so: Callable[[], bool], limit_s: float, helped: bool = True) -> dict[str, Any]:
        """Seconds until it is so; null when it was not in time."""
        began_s = time.monotonic()
        refreshed_s = began_s
        while not is_so():
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                return {"seconds": None}
            if helped and now_s - refreshed_s > _REFRESH_S:
                refresh(self._directory)
                refreshed_s = now_s
            time.sleep(0.01)
        return {"seconds": time.monotonic() - began_s}


def creates(path: Path, content: str) -> bool:
    """Commit a record as a run does; False when another writer's was there."""
    try:
        create_exclusively(path, content.encode())
    except AlreadyExistsError:
        return False
    return True
