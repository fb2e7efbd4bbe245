"""File operations that fail on purpose. A point of theirs is ``operation:kind``, kind being the directory in the run.

Temporary files count as what they become, since they lie in its directory.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from milesbatch.store.operations import Operations


class FaultyOperations(Operations):
    """Asks at every operation whether something must happen."""

    def __init__(
        self,
        root: Path,
        at: Callable[[str], None],
        error_at: Callable[[str], int | None],
        damage_at: Callable[[str, Path], None],
    ) -> None:
        # As the process spells it, and without links: a run directory may be reached by either.
        self._roots = (Path(os.path.abspath(root)), root.resolve())  # noqa: PTH100 - links stay
        self._at = at
        self._error_at = error_at
        self._damage_at = damage_at

    def create(self, path: Path) -> BinaryIO:
        self._pass("create", path)
        return cast(BinaryIO, _Watched(super().create(path), lambda: self._written(path)))

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        self._pass("sync_file", path)
        super().sync_file(path, stream)

    def sync_directory(self, path: Path) -> None:
        self._pass("sync_directory", path, is_directory=True)
        super().sync_directory(path)

    def link(self, source: Path, target: Path) -> None:
        name = self._pass("link", target)
        super().link(source, target)
        self._damage_at(name, target)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename", source)
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self._pass("replace", target)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._pass("unlink", path)
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._pass("make_directory", path, is_directory=True)
        super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self._pass("remove_directory", path, is_directory=True)
        super().remove_directory(path)

    def _written(self, path: Path) -> None:
        self._pass("write", path)

    def _pass(self, operation: str, path: Path, *, is_directory: bool = False) -> str:
        name = f"{operation}:{self._kind(path, is_directory)}"
        self._at(name)
        number = self._error_at(name)
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))
        return name

    def _kind(self, path: Path, is_directory: bool) -> str:
        """The first directory below the run, or ``run`` itself (and what lies outside of it)."""
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 - links stay
        for root in self._roots:
            if absolute.is_relative_to(root):
                parts = absolute.relative_to(root).parts
                return parts[0] if len(parts) > (0 if is_directory else 1) else "run"
        return "run"


class _Watched(io.RawIOBase):
    """A file whose every write is a point."""

    def __init__(self, stream: BinaryIO, passing: Callable[[], None]) -> None:
        self._stream = stream
        self._passing = passing

    def write(self, data: object) -> int:
        self._passing()
        return self._stream.write(cast(bytes, data))

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()
        super().close()
