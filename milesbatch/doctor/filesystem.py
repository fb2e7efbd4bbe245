"""Is a directory fit to hold runs, as far as one host can see? Design: docs/storage.md.

Owns: which filesystem it is, how much room there is, and the order of the probes. Never: what another host sees
(``pair.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from milesbatch.doctor import guarantees, speed
from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn
from milesbatch.doctor.workplace import Effort, nearest, workplace
from milesbatch.errors import StorageError
from milesbatch.store.mounts import MOUNTS, filesystem_kind
from milesbatch.store.places import true_path

_AREA = "filesystem"
_GIB = 1 << 30
_VOLATILE = ("tmpfs", "ramfs", "devtmpfs")
_LEAST_FREE_BYTES, _FEW_FREE_BYTES = _GIB, 20 * _GIB
_LEAST_INODES, _FEW_INODES = 10_000, 200_000
_PROBES: tuple[tuple[str, Callable[[Path, Effort], Check]], ...] = (
    ("exclusive creation", guarantees.creation_check),
    ("atomic link", guarantees.link_check),
    ("rename", guarantees.rename_check),
    ("replacing a file", guarantees.replace_check),
    ("fsync", speed.sync_check),
    ("listing", guarantees.listing_check),
    ("long names", guarantees.name_check),
    ("private files", guarantees.secret_check),
    ("the file server's clock", speed.clock_check),
    ("throughput", speed.throughput_check),
)


def filesystem_checks(directory: Path, effort: Effort | None = None) -> list[Check]:
    """All that one host can find out about ``directory``."""
    effort = effort or Effort()
    there = nearest(directory)
    checks = [place_check(directory, there), *room_checks(there)]
    try:
        with workplace(directory) as place:
            checks += [_guarded(name, probe, place, effort) for name, probe in _PROBES]
    except StorageError as error:
        checks.append(bad(_AREA, "writing", error.what, "no run can be made here", error.mend))
    return checks


def _guarded(name: str, probe: Callable[[Path, Effort], Check], place: Path, effort: Effort) -> Check:
    """An operation that fails altogether is an answer, too."""
    try:
        return probe(place, effort)
    except (OSError, StorageError) as error:
        what = error.what if isinstance(error, StorageError) else str(error)
        return bad(_AREA, name, what, "runs need this operation", "choose a directory on another filesystem")


# -- what it is -----------------------------------------------------------------------------------------------------------


def place_check(directory: Path, there: Path) -> Check:
    """Which filesystem it is, and how it is mounted."""
    kind = filesystem_kind(there) or "unknown"
    flags = os.statvfs(there).f_flag
    found = f"{there} is on {kind}" + ("" if there == directory.absolute() else f" ({directory} does not exist yet)")
    if flags & os.ST_RDONLY:
        return bad(_AREA, "place", f"{found}, mounted read-only", "no run can be made here", "choose another directory")
    if kind.startswith("nfs") and is_soft_mount(there):
        meaning = "when the server is slow, reads and writes fail in the middle of anything instead of waiting"
        return warn(_AREA, "place", f"{found}, mounted soft", meaning, "ask for a hard mount")
    if kind in _VOLATILE:
        meaning = "it is memory: a run is lost when the host restarts"
        return warn(_AREA, "place", found, meaning, "choose a directory on a disk or a shared filesystem")
    if kind == "overlay":
        meaning = "it is the inside of a container: a run is lost with it"
        return warn(_AREA, "place", found, meaning, "choose a directory that is mounted into the container")
    if flags & os.ST_NOEXEC:
        meaning = "runs work; an environment or compiled kernels in this directory do not"
        return warn(_AREA, "place", f"{found}, mounted noexec", meaning, "keep environments and caches elsewhere")
    return ok(_AREA, "place", found)


def is_soft_mount(there: Path, mounts: Path = MOUNTS) -> bool:
    """Is it on an NFS mount that gives up?"""
    try:
        lines = [line.partition(" - ") for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    points = {before.split()[4]: after.split() for before, _, after in lines if after.startswith("nfs")}
    above = [point for point in points if true_path(there).is_relative_to(point)]
    return bool(above) and "soft" in points[max(above, key=len)][-1].split(",")


def room_checks(there: Path) -> list[Check]:
    """Free space and free inodes, for an ordinary user."""
    status = os.statvfs(there)
    free, inodes = status.f_bavail * status.f_frsize, status.f_favail
    mend = "free some, or choose another directory; quotas are not seen from here (try `quota -s`, `lfs quota -h`)"
    space = f"{free / _GIB:.1f} GiB free (quotas are not seen)"
    meaning = "a run keeps trajectories and weights for its whole life; when there is no room it waits, then stops"
    if free < _FEW_FREE_BYTES:
        make = bad if free < _LEAST_FREE_BYTES else warn
        checks = [make(_AREA, "space", space, meaning, mend)]
    else:
        checks = [ok(_AREA, "space", space)]
    if not status.f_files:
        return [*checks, ok(_AREA, "inodes", "this filesystem has no fixed number of files")]
    if inodes < _FEW_INODES:
        make = bad if inodes < _LEAST_INODES else warn
        meaning = "a step makes about ten files; when there are none left it waits, then stops"
        return [*checks, make(_AREA, "inodes", f"room for {inodes:,} more files", meaning, mend)]
    return [*checks, ok(_AREA, "inodes", f"room for {inodes:,} more files")]


def unchecked_elsewhere(why: str) -> Check:
    """What one host cannot find out."""
    return unchecked(_AREA, "what another host sees", why, "milesbatch doctor --site SITE, where Slurm is")
