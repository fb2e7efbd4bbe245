"""Taking away what does not count, without ever taking what a newer incarnation has put in its place.

Records of two incarnations can have the same name: what an older one wrote after it had been sealed out is moved to
quarantine, and the newer one commits its own. A process that was judged dead in the middle of such a move, and wakes up after
that, would move the newer one's. So it looks at the fence just before, and at what it has moved just after: what a newer
incarnation wrote is put back. Owns that care; never decides what counts. Invariant: on return, or when an error is raised,
nothing that a newer incarnation wrote is in quarantine because of this call (killed between the move and the look, it is;
that takes a process that hangs in one system call until two more incarnations have begun, and then dies in the next).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from milesbatch.errors import FencedError
from milesbatch.store.durable import move_to_quarantine, read_optional, storage_error
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import current


def take_away(layout: RunLayout, incarnation: int, path: Path, reason: str) -> Path:
    """Move what must not be used to quarantine, for a process of ``incarnation``; returns where it is now.

    Raises:
        FencedError: a newer incarnation has taken over; what it wrote is where it was.
        StorageError: it could not be moved.
    """
    Fence(layout, incarnation).check()
    moved = move_to_quarantine(path, layout.quarantine, reason)
    writer = _writer_of(moved)
    if writer is not None and writer > incarnation:
        _put_back(moved, path)
        raise FencedError(
            f"incarnation {writer} has taken over {layout.root}, and {path.name} is its own",
            mend="nothing: the newer incarnation goes on with this run",
        )
    return moved


def _writer_of(moved: Path) -> int | None:
    """The incarnation that a record, or the manifest of a directory, says it is of; None when it says none."""
    data = read_optional(moved / "manifest.json" if moved.is_dir() else moved)
    try:
        body = json.loads(data) if data is not None else None
    except ValueError:
        return None
    writer = body.get("incarnation") if isinstance(body, dict) else None
    return writer if isinstance(writer, int) else None


def _put_back(moved: Path, path: Path) -> None:
    try:
        if moved.is_dir():
            current().rename(moved, path)
        else:
            current().link(moved, path)
            current().unlink(moved)
        current().sync_directory(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    with contextlib.suppress(OSError):
        current().unlink(moved.with_name(moved.name + ".reason.txt"))
