"""The artefact store: the one interface behind which committed bytes live, in a directory or in an object store.

Owns the promises (:class:`ArtefactStore`), the spelling of keys and the errors that callers tell apart. Never does I/O
itself. Invariant of every implementation, proven by one conformance suite (``tests/contract/store``): a key is absent,
or holds the whole content of exactly one commit; once committed it never changes, it can only go. The page behind it is
``docs/storage.md``; the split into landed, did not land and unknown follows the commit path of table formats on object
stores.

How a commit ends, for the caller:

* it returns: **landed** (by this call or by an earlier one of the same content) and durable;
* :class:`AlreadyExistsError`: did not land, another writer's content is there;
* :class:`OutcomeUnknownError`: **unknown**: looking did not settle it either; the same call again will;
* every other error, including what ``before_commit`` or the writer of the content raised: **did not land**.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from milesbatch.errors import StorageError
from milesbatch.records import FileRef
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.durable import AlreadyExistsError as AlreadyExistsError  # part of this interface
from milesbatch.store.layout import RunLayout

Check = Callable[[], None]
"""Called when the content is in place and just before it becomes visible; raises when it must not (the fence)."""
Write = Callable[[BinaryIO], object]
"""Writes the content to the stream it is given, in pieces of any size; chunks: ``lambda s: s.writelines(chunks)``."""

MANIFEST = "manifest.json"
QUARANTINE = RunLayout(Path()).quarantine.name
_MOST_BYTES_OF_A_NAME = 115  # filesystems take 255; in quarantine it is two names, a token and a suffix
_MOST_BYTES_IN_QUARANTINE = 255
_MOST_BYTES_OF_A_KEY = 800  # S3 takes 1024, the place of the run included


class KeyRefusedError(StorageError):
    """A key that not every store can hold, or that leads out of the store. Nothing was touched."""


class MissingArtefactError(StorageError):
    """The key is not there (or, with a stale view, not seen yet)."""


class OutcomeUnknownError(StorageError):
    """A commit may or may not have landed, now or later. The same call again settles it; nothing else may be concluded."""


class ArtefactStore(Protocol):
    """Committed bytes under keys such as ``weights/000013/manifest.json``.

    Keys: relative, ``/`` between names, see :func:`check_key`. A key is never also the beginning of another (``a`` and
    ``a/b``): stores differ in what they do then. All methods raise :class:`KeyRefusedError` for other keys, and
    ``StorageError`` (naming place, cause and mend) when the store does not answer or refuses.
    """

    @property
    def url(self) -> str:
        """Where this store is, for messages."""
        ...

    def create_exclusively(self, key: str, data: bytes, before_commit: Check | None = None) -> FileRef:
        """Commit a record; of several writers with different contents exactly one succeeds.

        ``before_commit`` runs before each attempt, so possibly more than once.

        Durability: on return durable and visible. Killed midway: nothing, or the whole content, is visible.

        Raises:
            AlreadyExistsError: other content was committed first.
            OutcomeUnknownError: see the module.
        """
        ...

    def publish(
        self, directory: str, name: str | Callable[[str], str], write: Write, before_commit: Check | None = None
    ) -> FileRef:
        """Commit payload of any size as ``directory/name``; exclusive as well. ``directory`` may be ``""``.

        ``name`` may be a function of the content's digest. What ``write`` raises passes through (an
        ``OSError`` possibly as ``StorageError``); nothing is visible then. Returns size, digest, and the name as ``path``.

        Durability, Raises: as :meth:`create_exclusively`; killed midway, unfinished parts may stay
        (:meth:`sweep_unfinished`).
        """
        ...

    def read(self, key: str) -> bytes | None:
        """The whole content, or None when there is none."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` (0-based) on, fewer only where the content ends.

        Raises:
            MissingArtefactError: there is no such key.
        """
        ...

    def read_verified(self, key: str, ref: FileRef) -> bytes:
        """The whole content, proven to be what ``ref`` says (``ref.path`` is not looked at).

        Raises:
            CorruptArtefactError: missing, truncated or changed.
        """
        ...

    def digest(self, key: str) -> FileRef:
        """Size and digest of what is there, read in pieces; ``path`` is the last name of the key.

        Raises:
            MissingArtefactError: there is no such key.
        """
        ...

    def verify(self, key: str, ref: FileRef) -> None:
        """Return only when the content is what ``ref`` says; reads all of it, in pieces.

        Raises:
            CorruptArtefactError: missing, truncated or changed.
        """
        ...

    def exists(self, key: str) -> bool:
        """Whether something is committed under ``key``. An error is never taken for absence."""
        ...

    def list_keys(self, prefix: str = "") -> list[str]:
        """Keys below the directory ``prefix`` (all for ``""``), sorted; quarantine and temporary names are left out.

        May be stale: what was committed or deleted lately may be missing or still named. Where a name can be
        predicted, ask for it by :meth:`read` or :meth:`exists` instead.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete what nothing needs; a key that is not there is fine. Safe to repeat as long as the key is not reused."""
        ...

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below the directory ``prefix``: all manifests first, so that no half artefact looks whole.

        Killed midway: payload without a manifest, which nobody takes for an artefact. With a stale listing some of
        that may stay; it costs space only.
        """
        ...

    def quarantine(self, key: str, reason: str) -> str:
        """Take what must not be used out of the way; returns the key under which it is kept, ``reason`` beside it.

        The reason is under the returned key + ``.reason.txt``. Killed midway: the content is under ``key``, or in
        quarantine, or (object stores) under both; never under neither.

        Raises:
            MissingArtefactError: there is no such key.
        """
        ...

    def sweep_unfinished(self, prefix: str = "") -> int:
        """Remove what killed writers left unfinished below ``prefix``; returns how many. Only while nobody writes."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` when every store can hold it and it cannot lead out of the store.

    Raises:
        KeyRefusedError: absolute, empty, ``.`` or ``..`` in it, a temporary name, too long, or characters that stores
            treat differently (control, backslash, not in Unicode's composed form).
    """
    most = _MOST_BYTES_IN_QUARANTINE if key.startswith(f"{QUARANTINE}/") else _MOST_BYTES_OF_A_NAME
    for name in key.split("/"):
        reason = _why_not(name, most)
        if reason:
            raise KeyRefusedError(
                f"{key!r} is not a key of an artefact: {reason}",
                mend="keys are relative and printable, such as 'weights/000013/manifest.json'",
            )
    if len(key.encode()) > _MOST_BYTES_OF_A_KEY:
        raise KeyRefusedError(
            f"the key {key[:80]!r}... has {len(key.encode())} bytes; at most {_MOST_BYTES_OF_A_KEY} are allowed",
            mend="use shorter names",
        )
    return key


def check_directory(prefix: str) -> str:
    """As :func:`check_key`, but ``""`` (the whole store) is allowed too."""
    return prefix and check_key(prefix)


def check_name(name: str) -> str:
    """As :func:`check_key`, for the last name alone."""
    if "/" in name:
        raise KeyRefusedError(f"{name!r} is not a file name: it has a '/'", mend="put directories into the directory")
    return check_key(name)


def check_range(start: int, length: int) -> None:
    """Refuse ranges that a store might read as counted from the end.

    Raises:
        ValueError: ``start`` or ``length`` is negative.
    """
    if start < 0 or length < 0:
        raise ValueError(f"a range cannot be negative: start {start}, length {length}")


def join(directory: str, name: str) -> str:
    """Key of ``name`` in ``directory`` (``""``: at the top)."""
    return f"{directory}/{name}" if directory else name


def _why_not(name: str, most_bytes: int) -> str:
    if name in ("", ".", ".."):
        return f"it has the name {name!r} in it" if name else "it is empty, or begins, ends or doubles a '/'"
    if name.startswith(TEMPORARY_PREFIX):
        return f"names with {TEMPORARY_PREFIX} are for unfinished files"
    if not name.isprintable() or "\\" in name:
        return "control characters, unpaired surrogates and backslashes are not allowed"
    if unicodedata.normalize("NFC", name) != name:
        return "it is not in Unicode's composed form (NFC)"
    if len(name.encode()) > most_bytes:
        return f"the name {name[:40]!r}... has {len(name.encode())} bytes; at most {most_bytes} are allowed"
    return ""
