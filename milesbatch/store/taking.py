"""Taking committed files of one run over into another directory, as they are.

Owns the way: a second name for the same bytes (``link``) where the filesystem gives one, which costs neither time nor space,
and a copy where it does not (another filesystem, a protected file, a filesystem without such names). Never changes the
source; never decides what is taken. Invariant: what is there on return has the digest that its record states, read back from
where it now lies. Relied on: files of a run are never changed after their commit, so that two names can share them.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import FileRef
from milesbatch.store.durable import publishing, storage_error, verify_file
from milesbatch.store.operations import current

_CANNOT_LINK = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
_CHUNK_BYTES = 1 << 20


def take_file(source: Path, ref: FileRef, target: Path) -> None:
    """Make ``source``, of which ``ref`` states size and digest, be ``target`` too. Its directory must exist.

    Durability: the content is durable; the name is when the caller has synced the directory.

    Raises:
        CorruptArtefactError: the source is missing or damaged; names it. Nothing that can be mistaken is left.
        StorageError: it cannot be read or written; says how much was to be written where space is short.
    """
    try:
        try:
            current().link(source, target)
        except FileExistsError:
            pass  # the reply to it was lost; what is there is compared below
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            _copy(source, ref, target)
    except FileNotFoundError as error:
        raise CorruptArtefactError(
            f"{source} is missing; expected {ref.bytes} bytes, {ref.digest}",
            mend="run `milesbatch audit` on its run",
            unseen=source,
        ) from error
    except OSError as error:
        raise storage_error(target, error, ref.bytes) from error
    try:
        verify_file(target, ref)
    except CorruptArtefactError as error:
        what = error.what.replace(str(target), str(source))
        raise CorruptArtefactError(what, mend="run `milesbatch audit` on its run") from error


def _copy(source: Path, ref: FileRef, target: Path) -> None:
    with open(source, "rb") as stream, publishing(target.parent, target.name, needed_bytes=ref.bytes) as file:
        shutil.copyfileobj(stream, file.stream, _CHUNK_BYTES)
