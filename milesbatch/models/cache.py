"""Directories that cost something to make, kept by the digest of what they were made from.

Owns the layout of a cache entry: ``KEY/files-TOKEN/…`` holds the files, ``KEY/manifest.json`` names that directory and the
digest of each file, and its exclusive creation is the commit. Never trusts a file without its digest. Invariant: a
directory that :func:`cached_directory` returns was complete and undamaged when it returned. Several builders may work at
once; the first to commit wins and the others use its result. A builder that is killed leaves an uncommitted directory,
which nobody reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import FileRef, Record
from milesbatch.store import durable

_ATTEMPTS = 3


class CacheRecord(Record):
    """``manifest.json`` of a cache entry."""

    kind: ClassVar[str] = "cache"
    directory: str
    files: tuple[FileRef, ...]


def cached_directory(entry: Path, build: Callable[[Path], None], report: Callable[[str], None]) -> Path:
    """The files that ``build`` makes, from the cache when they are there and undamaged, else built now.

    ``build`` fills the empty directory that it gets. Damage is reported, the damaged files are removed and built again.

    Durability: on return the files are durable and committed.

    Raises:
        StorageError: the cache cannot be written; or it was damaged again each time it was built.
    """
    durable.make_directory(entry)
    for _ in range(_ATTEMPTS):
        try:
            found = _committed(entry)
        except CorruptArtefactError as error:
            report(f"the cache entry {entry} is damaged and is built again: {error.what}")
            _discard(entry)
            found = None
        if found is not None:
            return found
        _build(entry, build)
    raise StorageError(
        f"the cache entry {entry} was damaged {_ATTEMPTS} times in a row",
        mend="check that disk, or choose another cache",
    )


def _committed(entry: Path) -> Path | None:
    manifest = entry / "manifest.json"
    data = durable.read_optional(manifest)
    if data is None:
        return None
    record = CacheRecord.from_bytes(data, str(manifest))
    for ref in record.files:
        durable.verify_file(entry / record.directory / ref.path, ref)
    return entry / record.directory


def _discard(entry: Path) -> None:
    """Remove the commit only: files of another builder, who may have committed meanwhile, must stay."""
    durable.remove_file(entry / "manifest.json")


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    directory = entry / f"files-{secrets.token_hex(6)}"
    durable.make_directory(directory)
    try:
        build(directory)
    except OSError as error:
        raise durable.storage_error(directory, error) from error
    durable.sync_tree(directory)
    files = tuple(
        durable.file_ref(path, path.relative_to(directory).as_posix())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )
    record = CacheRecord(directory=directory.name, files=files)
    try:
        durable.create_exclusively(entry / "manifest.json", record.to_bytes())
    except durable.AlreadyExistsError:
        durable.remove_tree(directory)
