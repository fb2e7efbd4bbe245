"""How bytes become an artefact, by the operations of ``store/operations.py``.

Two ways to commit, both *durable before visible*:

* :func:`create_exclusively`: temporary file, fsync, ``link`` to the final name, fsync of the directory. Exactly one of
  several writers succeeds. Used for records and manifests, whose creation is the commit of what they name.
* :func:`publish_file` / :class:`PublishedFile`: temporary file, fsync, ``link`` (exclusive as well), fsync of the directory.
  Used for payload that a manifest or a later record names by digest.

Crash states: a temporary file ``.tmp-*`` may stay behind (swept by the next take-over, see ``store/takeover.py``); the
final name either does not exist or has the whole content. After a crash of the machine the final name may exist only if
its content was synced before. On network filesystems a lost reply can report "exists" after success: then the contents
are compared before the race counts as lost.

Relied on: atomic ``link`` within a directory, fsync. Not relied on: flock, mtimes, directory listings.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from milesbatch.errors import (
    CorruptArtefactError,
    NameTooLongError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.operations import current

T = TypeVar("T")
TEMPORARY_PREFIX = ".tmp-"
SILLY_PREFIX = ".nfs"
"""Begins the names under which NFS keeps files that were deleted while somebody had them open; they go by themselves."""
_TRIES = 3
"""Of operations whose reply may have been lost, and of reads of a name that was just given to another file."""
_CHUNK_BYTES = 1 << 20


class AlreadyExistsError(StorageError):
    """The final name exists with other content: another writer won."""


def is_residue(name: str) -> bool:
    """Is a file of this name nobody's artefact: unfinished, or deleted?"""
    return name.startswith((TEMPORARY_PREFIX, SILLY_PREFIX))


def storage_error(path: Path, error: OSError, needed_bytes: int | None = None) -> StorageError:
    """Turn an ``OSError`` into the error that names the path, the cause and the mend."""
    needed = "" if needed_bytes is None else f" (about {needed_bytes:,} bytes were to be written)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(
            f"no space or quota left for {path}{needed}",
            mend="free space (or raise the quota) on that filesystem and give the same command again; nothing was lost",
        )
    if error.errno == errno.EROFS:
        return StorageReadOnlyError(
            f"cannot write {path}: {os.strerror(error.errno)}",
            mend="make that filesystem writable again and give the same command; nothing was lost",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return StorageReadOnlyError(
            f"cannot use {path}: {os.strerror(error.errno)}",
            mend="give this user the permission to read and write it, or choose another directory",
        )
    if error.errno == errno.ENAMETOOLONG:
        return NameTooLongError(f"cannot use {path}: the name is too long", mend="give a shorter one")
    cause = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"cannot use {path}: {cause}", mend="check the filesystem, then give the same command again")


def make_directory(directory: Path) -> None:
    """Create ``directory`` and its parents, durably.

    Raises:
        StorageError: it cannot be created.
    """
    try:
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        for path in reversed(missing):
            try:
                current().make_directory(path)
            except OSError as error:
                # Another process was quicker, or the reply was lost.
                if not path.is_dir():
                    raise error if error.errno != errno.EEXIST else _not_a_directory(path) from None
            current().sync_directory(path.parent)
        if not directory.is_dir():
            raise _not_a_directory(directory)
    except OSError as error:
        raise storage_error(directory, error) from error


def _not_a_directory(path: Path) -> OSError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


@dataclass
class PublishedFile:
    """An open temporary file; after the ``with`` block of :func:`publishing` it is committed and ``ref`` is set."""

    stream: BinaryIO
    ref: FileRef | None = None


@contextlib.contextmanager
def publishing(
    directory: Path,
    name: str | Callable[[str], str],
    before_commit: Callable[[], None] | None = None,
    needed_bytes: int | None = None,
) -> Iterator[PublishedFile]:
    """Write a file through ``.stream`` and commit it as ``directory / name`` when the block ends without an error.

    ``name`` may be a function of the content's digest. ``before_commit`` runs when the data is durable and just
    before it becomes visible (the fencing check belongs there). ``needed_bytes``, about, is told when there is no space.

    Durability: on return the file is durable and visible; if killed midway only a ``.tmp-*`` file may be left.

    Raises:
        StorageFullError, StorageReadOnlyError, StorageError: nothing was committed.
        AlreadyExistsError: the name exists with other content.
    """
    try:
        temporary, created = _create_temporary(directory)
        try:
            with created as stream:
                published = PublishedFile(stream)
                yield published
                current().sync_file(temporary, stream)
            written = file_ref(temporary)
            final_name = name if isinstance(name, str) else name(written.digest)
            published.ref = written.model_copy(update={"path": final_name})
            if before_commit is not None:
                before_commit()
            _link(temporary, directory / final_name, published.ref)
        finally:
            with contextlib.suppress(OSError):
                current().unlink(temporary)
        current().sync_directory(directory)
    except OSError as error:
        raise storage_error(directory / name if isinstance(name, str) else directory, error, needed_bytes) from error


def _create_temporary(directory: Path) -> tuple[Path, BinaryIO]:
    """A new file of a name that is nobody else's; one that exists is this call's own, its reply was lost."""
    tries = 1
    while True:
        path = directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            return path, current().create(path)
        except FileExistsError:
            if tries == _TRIES:
                raise
            tries += 1


def _link(temporary: Path, final: Path, ref: FileRef) -> None:
    try:
        current().link(temporary, final)
    except OSError as error:
        # NFS may have lost the reply to a link that succeeded: same content means that this writer won.
        found = read_digest(final)
        if found == (ref.bytes, ref.digest):
            return
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(f"{final} was already committed by another writer") from None
        raise


def publish_file(final: Path, data: bytes, before_commit: Callable[[], None] | None = None) -> FileRef:
    """Commit ``data`` under ``final``; see :func:`publishing` for durability and errors."""
    try:
        with publishing(final.parent, final.name, before_commit) as file:
            file.stream.write(data)
    except StorageFullError as error:
        raise storage_error(final, OSError(errno.ENOSPC, ""), len(data)) from error
    assert file.ref is not None
    return file.ref


def create_exclusively(final: Path, data: bytes, before_commit: Callable[[], None] | None = None) -> None:
    """Commit a record: exactly one of several concurrent writers of ``final`` succeeds.

    Raises:
        AlreadyExistsError: another writer committed other content first.
        StorageError: nothing was committed.
    """
    publish_file(final, data, before_commit)


def replace_hint(path: Path, data: bytes) -> None:
    """Overwrite a *hint* (liveness, addresses): not an artefact, not durable, never read to decide what is true."""
    try:
        temporary, created = _create_temporary(path.parent)
        try:
            with created as stream:
                stream.write(data)
            current().replace(temporary, path)
        except OSError:
            if read_optional(path) != data:  # else only the reply was lost
                raise
        finally:
            with contextlib.suppress(OSError):
                current().unlink(temporary)
    except OSError as error:
        raise storage_error(path, error) from error


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on; not durable. Overwrites its predecessor.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise storage_error(path, error) from error


def sync_tree(directory: Path) -> None:
    """Make files that another library wrote under ``directory`` durable, then the directories."""
    try:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                with open(path, "rb") as stream:
                    current().sync_file(path, stream)
        for path in [*(p for p in directory.rglob("*") if p.is_dir()), directory, directory.parent]:
            current().sync_directory(path)
    except OSError as error:
        raise storage_error(directory, error) from error


def move_to_quarantine(path: Path, quarantine: Path, reason: str) -> Path:
    """Move a file or directory that must not be used out of the way; it is kept, with the reason beside it.

    Durability: on return the move is durable. If killed midway the artefact is in one of the two places.
    """
    make_directory(quarantine)
    target = quarantine / f"{path.parent.name}.{path.name}.{secrets.token_hex(4)}"
    try:
        try:
            current().rename(path, target)
        except OSError:
            if not target.exists():  # else only the reply was lost
                raise
        current().sync_directory(path.parent)
        current().sync_directory(quarantine)
    except OSError as error:
        raise storage_error(path, error) from error
    with contextlib.suppress(OSError), current().create(target.with_name(target.name + ".reason.txt")) as stream:
        stream.write(reason.encode() + b"\n")  # for people
    return target


def remove_tree(directory: Path) -> None:
    """Delete an artefact directory that nothing needs: its manifest first, so that no half artefact is ever taken for one.

    Of a link, here or below, only itself. Crash state: a directory without a manifest, which nobody takes for an artefact.
    """
    if directory.is_symlink():
        return remove_files(directory.parent, (directory.name,))
    try:
        with contextlib.suppress(FileNotFoundError):
            current().unlink(directory / "manifest.json")
        with contextlib.suppress(FileNotFoundError):
            current().sync_directory(directory)
        for path in sorted(directory.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):  # what stays is payload without a manifest: it costs space only
                (current().remove_directory if path.is_dir() and not path.is_symlink() else current().unlink)(path)
        with contextlib.suppress(OSError):
            current().remove_directory(directory)
        current().sync_directory(directory.parent)
    except OSError as error:
        raise storage_error(directory, error) from error


def remove_file(path: Path) -> None:
    """Delete a file that nothing needs; one that is gone already is fine."""
    try:
        with contextlib.suppress(FileNotFoundError):
            current().unlink(path)
    except OSError as error:
        raise storage_error(path, error) from error


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Delete files of ``directory``, durably; those that are gone already are fine. Crash state: some of them are left."""
    for name in names:
        remove_file(directory / name)
    sync_names(directory)


def sync_names(directory: Path) -> None:
    """Make the names in ``directory`` durable, those that others gave included."""
    try:
        current().sync_directory(directory)
    except OSError as error:
        raise storage_error(directory, error) from error


def sweep_temporary(directory: Path) -> int:
    """Remove what crashed writers left behind in ``directory``; returns how many. Only while no other writer is alive."""
    count = 0
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        if not path.is_dir():  # nobody here makes such directories; it costs nothing where it is
            remove_file(path)
            count += 1
    return count


# -- reading --------------------------------------------------------------------------------------------------------


def digest_file(path: Path) -> str:
    """Digest of a file's bytes, read in chunks."""
    return _size_and_digest(path)[1]


def _size_and_digest(path: Path) -> tuple[int, str]:
    hasher, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return size, "xxh128:" + hasher.hexdigest()


def read_digest(path: Path) -> tuple[int, str] | None:
    """Size and digest of what is read from a file, not of what ``stat`` says; None when it does not exist.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return _not_stale(lambda: _size_and_digest(path))
    except FileNotFoundError:
        return None


def _not_stale(read: Callable[[], T]) -> T:
    """Result of ``read``; when the file behind the name was exchanged meanwhile (ESTALE), that of another look."""
    tries = 1
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE or tries == _TRIES:
                raise
            tries += 1


def ends_with(path: Path, ending: bytes) -> bool:
    """Does a file end like this? One that is only seen in part does not.

    Raises:
        StorageError: it cannot be read.
    """
    data = read_optional(path)
    return data is not None and data.endswith(ending)


def file_ref(path: Path, name: str | None = None) -> FileRef:
    """Size and digest of what is read from a file, under ``name`` (default: its own)."""
    try:
        size, digest = _size_and_digest(path)
    except OSError as error:
        raise storage_error(path, error) from error
    return FileRef(path=name or path.name, bytes=size, digest=digest)


def verify_file(path: Path, ref: FileRef) -> None:
    """Check a committed payload file against its reference before it is used.

    Raises:
        CorruptArtefactError: missing, truncated or changed; names the path and both digests.
    """
    mend = "run `milesbatch audit` on the run; this file must not be used"
    try:
        found = read_digest(path)
    except OSError as error:
        raise storage_error(path, error) from error
    if found is None:
        what = f"{path} is missing; expected {ref.bytes} bytes, {ref.digest}"
        raise CorruptArtefactError(what, mend=mend, unseen=path)
    size, digest = found
    if size != ref.bytes:
        digest = f"another size ({size} bytes, expected {ref.bytes})"
    if digest != ref.digest:
        what = f"{path} is damaged: expected {ref.digest}, found {digest}"
        raise CorruptArtefactError(what, mend=mend, unseen=path if size < ref.bytes else None)


def verify_files(directory: Path, files: Iterable[FileRef]) -> None:
    """Check the payload files of an artefact, which lie below ``directory``; see :func:`verify_file`.

    Raises:
        CorruptArtefactError: for the first one that is missing, truncated or changed.
    """
    for ref in files:
        verify_file(directory / ref.path, ref)


def read_verified(path: Path, digest: str) -> bytes:
    """Read a whole file and return it only when its digest is the expected one.

    Raises:
        CorruptArtefactError: missing, truncated or changed.
    """
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(
            f"{path} is missing; expected {digest}", mend="run `milesbatch audit` on the run", unseen=path
        )
    found = digest_bytes(data)
    if found != digest:
        raise CorruptArtefactError(
            f"{path} is damaged: expected {digest}, found {found}", mend="run `milesbatch audit` on the run"
        )
    return data


def read_optional(path: Path) -> bytes | None:
    """Content of a file, or None when it does not exist.

    Raises:
        StorageError: it exists but cannot be read.
    """
    try:
        return _not_stale(path.read_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(path, error) from error
