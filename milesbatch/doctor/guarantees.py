"""The guarantees of a filesystem that runs rely on, as far as one host can see them. Design: docs/storage.md.

Owns: trying them, and what it means when one does not hold. Never: what another host sees (``pair_tests.py``). Invariant:
writes only in the directory that it is given.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from milesbatch.doctor.verdict import Check, bad, ok, warn
from milesbatch.doctor.workplace import Effort
from milesbatch.store.durable import replace_hint, write_secret
from milesbatch.store.operations import current

_AREA = "filesystem"
_LONGEST_NAME = 143
"""Bytes; the longest name that a run gives is shorter, and no filesystem in use allows less."""


def creation_check(place: Path, effort: Effort) -> Check:
    """Of several writers who create one name, exactly one succeeds."""
    winners = [_race(effort.writers, _creates, place / f"new-{turn}") for turn in range(effort.races)]
    return _race_verdict("exclusive creation", winners, effort)


def link_check(place: Path, effort: Effort) -> Check:
    """Of several writers who link their file to one name, exactly one succeeds, and its content is there."""
    winners = []
    for turn in range(effort.races):
        name = place / f"linked-{turn}"
        for number in range(effort.writers):
            (place / f"own-{number}").write_bytes(b"%d" % number)
        won = _race(effort.writers, _links, name)
        if len(won) == 1 and name.read_bytes() != b"%d" % won[0]:
            return bad(_AREA, "atomic link", "the winner's content is not what is there", *_NO_COMMITS)
        winners.append(won)
        for number in range(effort.writers):
            current().unlink(place / f"own-{number}")
    return _race_verdict("atomic link", winners, effort)


_NO_COMMITS = (
    "two writers may both believe that they committed: steps could be trained twice",
    "this filesystem cannot hold a run; choose another (NFSv4, Lustre, BeeGFS, GPFS and local disks can)",
)


def _race_verdict(name: str, winners: list[list[int]], effort: Effort) -> Check:
    wrong = [won for won in winners if len(won) != 1]
    if wrong:
        found = f"in {len(wrong)} of {len(winners)} races {len(wrong[0])} of {effort.writers} writers succeeded"
        return bad(_AREA, name, found, *_NO_COMMITS)
    return ok(_AREA, name, f"{len(winners)} races of {effort.writers} writers had one winner each")


def _race(writers: int, attempt: Callable[[Path, int], bool], name: Path) -> list[int]:
    """Numbers of those that got ``name``."""
    start = threading.Barrier(writers)

    def run(number: int) -> bool:
        start.wait()
        return attempt(name, number)

    with ThreadPoolExecutor(writers) as pool:
        return [number for number, won in enumerate(pool.map(run, range(writers))) if won]


def _creates(name: Path, number: int) -> bool:
    try:
        current().create(name).close()
    except FileExistsError:
        return False
    return True


def _links(name: Path, number: int) -> bool:
    try:
        current().link(name.with_name(f"own-{number}"), name)
    except FileExistsError:
        return False
    return True


def rename_check(place: Path, effort: Effort) -> Check:
    """A file and a directory move as a whole."""
    (place / "file").write_bytes(b"content")
    current().rename(place / "file", place / "file-moved")
    (place / "folder").mkdir()
    (place / "folder" / "inside").write_bytes(b"content")
    current().rename(place / "folder", place / "folder-moved")
    whole = (place / "file-moved").read_bytes() == (place / "folder-moved" / "inside").read_bytes() == b"content"
    if not whole or (place / "file").exists() or (place / "folder").exists():
        return bad(_AREA, "rename", "what was moved is not whole at its new name", *_NO_COMMITS)
    return ok(_AREA, "rename", "files and directories")


def replace_check(place: Path, effort: Effort) -> Check:
    """A reader of a file that is replaced sees the old content or the new, always whole."""
    hint = place / "hint"
    replace_hint(hint, b"0" * 4096)
    seen: list[bytes] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(hint.read_bytes())

    reader = ThreadPoolExecutor(1)
    reading = reader.submit(read)
    for turn in range(5 * effort.races):
        replace_hint(hint, b"%d" % (turn % 10) * 4096)
    is_over.set()
    reader.shutdown()
    if reading.exception() is not None:
        meaning = "a controller may be taken for dead while it writes its sign of life; no data is at risk"
        return warn(
            _AREA, "replacing a file", f"a reader met {reading.exception()!r}", meaning, "choose another filesystem"
        )
    if torn := [data for data in seen if len(data) != 4096 or len(set(data)) != 1]:
        meaning = "signs of life are sometimes unreadable; no data is at risk"
        return warn(
            _AREA,
            "replacing a file",
            f"{len(torn)} of {len(seen)} reads were torn",
            meaning,
            "choose another filesystem",
        )
    return ok(_AREA, "replacing a file", f"{len(seen)} reads, all whole")


def listing_check(place: Path, effort: Effort) -> Check:
    """A new name is in the listing at once, on the host that made it."""
    folder = place / "listing"
    folder.mkdir()
    missed = 0
    for turn in range(effort.races):
        (folder / str(turn)).write_bytes(b"")
        missed += folder / str(turn) not in list(folder.iterdir())
    if missed:
        meaning = "files of this very host show late; runs look for names that they can predict, and wait"
        found = f"{missed} of {effort.races} new names were not in the next listing"
        return warn(_AREA, "listing", found, meaning, "raise slurm.visible_wait_s if starts quarantine sound files")
    return ok(_AREA, "listing", "shows what this host made at once")


def name_check(place: Path, effort: Effort) -> Check:
    """Names as long as a run's."""
    try:
        (place / ("n" * _LONGEST_NAME)).write_bytes(b"")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        mend = "choose a directory on another filesystem, or one with a shorter path"
        return bad(
            _AREA, "long names", f"a name of {_LONGEST_NAME} bytes is refused", "trajectory files need them", mend
        )
    return ok(_AREA, "long names", f"{_LONGEST_NAME} bytes")


def secret_check(place: Path, effort: Effort) -> Check:
    """A file that only its owner may read stays so."""
    write_secret(place / "secret", b"secret")
    mode = (place / "secret").stat().st_mode & 0o777
    if mode & 0o077:
        meaning = "the secret by which workers join a run can be read by others who can enter the directory"
        return warn(
            _AREA, "private files", f"mode 600 became {mode:o}", meaning, "keep others out of the run directory"
        )
    return ok(_AREA, "private files", "mode 600 is kept")
