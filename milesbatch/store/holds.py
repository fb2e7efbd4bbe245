"""Holds: how a reader that is no process of the run keeps the weights that it reads from being retired meanwhile.

Owns the files under ``holds/``: :func:`holding` on the reader's side, :class:`HoldWatch` on that of the one that retires. Never
decides what goes. Invariant: a hold counts from when it is seen until its content has not changed for ``STALE_S`` seconds on
the *watcher's* monotonic clock; clocks of two hosts are never compared, and a reader that crashed pins nothing for ever. The
page behind it is ``docs/format.md``.

A reader that was killed leaves its hold behind. The one that retires removes it after ``STALE_S``; the next reader, and the
next take-over, remove those of processes that have ended on their own host at once (:func:`remove_abandoned`).

A hold is a hint, not a lock: one that is written after the watcher looked protects nothing yet, and a listing may be old on a
network filesystem. The reader then finds payload gone and says so; it never reads something wrong.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from milesbatch.errors import CorruptArtefactError, FormatVersionError, StorageError
from milesbatch.records import Hold
from milesbatch.store.durable import make_directory, read_optional, remove_file, replace_hint, storage_error
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import process_started

RENEW_S = 10.0
STALE_S = 60.0
"""Several renewals, so that a slow filesystem or a short pause of the reader does not end its hold."""


@contextlib.contextmanager
def holding(layout: RunLayout, version: int, reader: str, renew_s: float = RENEW_S) -> Iterator[bool]:
    """Hold policy ``version`` and later ones while the block runs; gives False where no hold can be written.

    A run directory that cannot be written to (a copy, or another user's) is read all the same, without protection.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    path, ended = layout.hold(name), threading.Event()

    def write(count: int) -> bool:
        record = Hold(version=version, reader=reader, host=socket.gethostname(), pid=os.getpid(), count=count)
        try:
            make_directory(layout.holds)
            replace_hint(path, record.to_bytes())
        except StorageError:
            return False
        return True

    def renew() -> None:
        count = 1
        while not ended.wait(renew_s):
            count += 1
            write(count)

    if not write(1):
        yield False
        return
    with contextlib.suppress(StorageError):
        remove_abandoned(layout)
    thread = threading.Thread(target=renew, name="hold", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(StorageError):
            remove_file(path)


def remove_abandoned(layout: RunLayout) -> None:
    """Remove holds of readers that ran on this host and have ended. One of a living reader would be written again anyway.

    Raises:
        StorageError: they cannot be read, or one not be removed.
    """
    for name, data in _read(layout).items():
        try:
            record = Hold.from_bytes(data, name)
        except (CorruptArtefactError, FormatVersionError):
            continue  # the one that retires watches it
        if record.host == socket.gethostname() and process_started(record.pid) is None:
            remove_file(layout.hold(name))


class HoldWatch:
    """What readers hold, as one process sees it over time. Not for several threads."""

    def __init__(
        self, layout: RunLayout, stale_s: float = STALE_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout, self._stale_s, self._now_s = layout, stale_s, now_s
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Name -> content, and when that content was first seen."""

    def versions(self) -> tuple[int, ...] | None:
        """Versions that living readers hold; None when one of the holds cannot be understood: then nothing is known.

        Holds that have not changed for long are removed.

        Raises:
            StorageError: they cannot be read, or a stale one not be removed.
        """
        now_s = self._now_s()
        held: list[int | None] = []
        present = _read(self._layout)
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}
        for name, data in present.items():
            before = self._seen.get(name)
            if before is None or before[0] != data:
                self._seen[name] = (data, now_s)
            elif now_s - before[1] >= self._stale_s:
                remove_file(self._layout.hold(name))
                continue
            held.append(_version(name, data))
        return None if None in held else tuple(version for version in held if version is not None)


def _read(layout: RunLayout) -> dict[str, bytes]:
    """Name -> content."""
    try:
        paths = sorted(layout.holds.glob("*.json"))
    except OSError as error:
        raise storage_error(layout.holds, error) from error
    content = {path.stem: read_optional(path) for path in paths}
    return {name: data for name, data in content.items() if data is not None}


def _version(name: str, data: bytes) -> int | None:
    try:
        return Hold.from_bytes(data, name).version
    except (CorruptArtefactError, FormatVersionError):
        return None  # torn, or of a newer reader
