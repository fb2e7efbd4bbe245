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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from milesbatch.errors import CorruptArtefactError, StorageError, StorageFullError, StorageReadOnlyError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.operations import current

TEMPORARY_PREFIX = ".tmp-"
_CHUNK_BYTES = 1 << 20


class AlreadyExistsError(StorageError):
    """The final name exists with other content: another writer won."""


def storage_error(path: Path, error: OSError, needed_bytes: int | None = None) -> StorageError:
    """Turn an ``OSError`` into the error that names the path, the cause and the mend."""
    needed = "" if needed_bytes is None else f" (about {needed_bytes:,} bytes were to be written)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(
            f"no space or quota left for {path}{needed}",
            mend="free space (or raise the quota) on that filesystem and give the same command again; nothing was lost",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StorageReadOnlyError(
            f"cannot write {path}: {os.strerror(error.errno)}",
            mend="make the directory writable for this user, or choose another with --run-dir",
        )
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
            with contextlib.suppress(FileExistsError):  # another process was quicker
                current().make_directory(path)
            current().sync_directory(path.parent)
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    except OSError as error:
        raise storage_error(directory, error) from error


@dataclass
class PublishedFile:
    """An open temporary file; after the ``with`` block of :func:`publishing` it is committed and ``ref`` is set."""

    stream: BinaryIO
    ref: FileRef | None = None


@contextlib.contextmanager
def publishing(
    directory: Path, name: str | Callable[[str], str], before_commit: Callable[[], None] | None = None
) -> Iterator[PublishedFile]:
    """Write a file through ``.stream`` and commit it as ``directory / name`` when the block ends without an error.

    ``name`` may be a function of the content's digest. ``before_commit`` runs when the data is durable and just
    before it becomes visible (the fencing check belongs there).

    Durability: on return the file is durable and visible; if killed midway only a ``.tmp-*`` file may be left.

    Raises:
        StorageFullError, StorageReadOnlyError, StorageError: nothing was committed.
        AlreadyExistsError: the name exists with other content.
    """
    temporary = directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        try:
            with current().create(temporary) as stream:
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
        raise storage_error(directory / name if isinstance(name, str) else directory, error) from error


def _link(temporary: Path, final: Path, ref: FileRef) -> None:
    try:
        current().link(temporary, final)
    except FileExistsError:
        # NFS may have lost the reply to a link that succeeded: same content means that this writer won.
        if final.stat().st_size != ref.bytes or digest_file(final) != ref.digest:
            raise AlreadyExistsError(f"{final} was already committed by another writer") from None


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
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        with current().create(temporary) as stream:
            stream.write(data)
        current().replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            current().unlink(temporary)
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
        current().rename(path, target)
        current().sync_directory(path.parent)
        current().sync_directory(quarantine)
        with current().create(target.with_name(target.name + ".reason.txt")) as stream:
            stream.write(reason.encode() + b"\n")
    except OSError as error:
        raise storage_error(path, error) from error
    return target


def remove_tree(directory: Path) -> None:
    """Delete an artefact directory that nothing needs: its manifest first, so that no half artefact is ever taken for one.

    Crash state: a directory without a manifest, which nobody takes for an artefact.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            current().unlink(directory / "manifest.json")
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
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return "xxh128:" + hasher.hexdigest()


def file_ref(path: Path, name: str | None = None) -> FileRef:
    """Size and digest of a file, under ``name`` (default: its own)."""
    try:
        return FileRef(path=name or path.name, bytes=path.stat().st_size, digest=digest_file(path))
    except OSError as error:
        raise storage_error(path, error) from error


def verify_file(path: Path, ref: FileRef) -> None:
    """Check a committed payload file against its reference before it is used.

    Raises:
        CorruptArtefactError: missing, truncated or changed; names the path and both digests.
    """
    mend = "run `milesbatch audit` on the run; this file must not be used"
    try:
        size = path.stat().st_size
        found = digest_file(path) if size == ref.bytes else f"another size ({size} bytes, expected {ref.bytes})"
    except FileNotFoundError:
        raise CorruptArtefactError(f"{path} is missing; expected {ref.bytes} bytes, {ref.digest}", mend=mend) from None
    except OSError as error:
        raise storage_error(path, error) from error
    if found != ref.digest:
        raise CorruptArtefactError(f"{path} is damaged: expected {ref.digest}, found {found}", mend=mend)


def read_verified(path: Path, digest: str) -> bytes:
    """Read a whole file and return it only when its digest is the expected one.

    Raises:
        CorruptArtefactError: missing, truncated or changed.
    """
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing; expected {digest}", mend="run `milesbatch audit` on the run")
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
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(path, error) from error
