"""Which kind of filesystem a directory is on: one that only this host mounts, or one whose view may lag behind others.

Owns the reading of the kernel's mount table; never touches the filesystem itself. Invariant: a kind that is not known counts
as shared, since waiting in vain costs time and not waiting may cost data. Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from pathlib import Path

from milesbatch.store.places import true_path

MOUNTS = Path("/proc/self/mountinfo")
_LOCAL_KINDS = frozenset(
    {
        "bcachefs",
        "btrfs",
        "devtmpfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "rootfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_local(path: Path) -> bool:
    """Is ``path`` on a filesystem of this host, which shows every change at once? False when that is not known."""
    return filesystem_kind(path) in _LOCAL_KINDS


def filesystem_kind(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The kernel's name of the filesystem that ``path`` is (or would be) on, such as ``nfs4``; None when it cannot be told.

    Raises:
        InputError: symbolic links lead in a circle.
    """
    try:
        lines = mounts.read_text().splitlines()
        place = true_path(path)
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if place.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), after.split()[0])  # of two on one place the later one is on top
    return None if best is None else best[1]
