"""Small filesystems that can fill up, or turn read-only under a living run. They need root, as CI has it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_CHUNKS = (1 << 20, 1 << 12, 64)


@contextlib.contextmanager
def small_disk(place: Path, size: str, *options: str) -> Iterator[Path]:
    """An empty memory filesystem of ``size`` at ``place``."""
    place.mkdir()
    _sh("mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", place)
    try:
        yield place
    finally:
        _sh("umount", "-l", place)


def fill(place: Path) -> Path:
    """Take all the space there is, to the last bytes; whoever unlinks the file that is returned gives it back."""
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as stream:
        for size in _CHUNKS:
            with contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(size))
    return ballast


class Disk(Protocol):
    """A filesystem that turns read-only while files on it are open for writing, which ``mount -o remount,ro`` refuses."""

    place: Path

    def break_down(self) -> None: ...
    def mend(self) -> None: ...


class Ext4Disk:
    """Turned read-only by the kernel, after an error of the disk; files that are open cannot be written any more either."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "disk"
        self._image = directory / "disk.img"
        self.place.mkdir()
        with open(self._image, "wb") as stream:
            stream.truncate(64 << 20)
        _sh("mkfs.ext4", "-q", self._image)
        self._mount()

    def _mount(self) -> None:
        _sh("mount", "-o", "loop,errors=remount-ro", self._image, self.place)

    def break_down(self) -> None:
        mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
        (device,) = (words[0] for words in mounts if words[1] == str(self.place))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("broken by a test")

    def mend(self) -> None:
        _sh("umount", self.place)  # not lazily: that nobody uses it any more is part of the test
        self._mount()

    def remove(self) -> None:
        _sh("umount", "-l", self.place)


class BoundDisk:
    """A read-only mount that is laid over the one that the run began on, as when an administrator changes an export."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "disk"
        self._behind = directory / "behind"
        for path in (self.place, self._behind):
            path.mkdir()
        _sh("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self._behind)
        _sh("mount", "--bind", self._behind, self.place)

    def break_down(self) -> None:
        _sh("mount", "--bind", self._behind, self.place)
        _sh("mount", "-o", "remount,bind,ro", self.place)

    def mend(self) -> None:
        _sh("umount", self.place)

    def remove(self) -> None:
        for path in (self.place, self._behind):
            _sh("umount", "-l", path)


def _sh(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)
