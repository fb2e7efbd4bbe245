"""Committing a whole directory by one rename: for what is handed to other tools, which know nothing of manifests.

Artefacts of a run are not made this way (``store/durable.py``): a rename of a directory is one step on a POSIX filesystem, and
perhaps not on a mounted object store.
"""

from __future__ import annotations

import errno
from pathlib import Path

from milesbatch.store.durable import AlreadyExistsError, storage_error, sync_tree
from milesbatch.store.operations import current


def publish_directory(staged: Path, final: Path) -> None:
    """Commit a directory that was written beside ``final``, on the same filesystem: it appears whole, or not at all.

    Durability: on return it is durable and visible under ``final``. If killed midway it is in one of the two places.

    Raises:
        AlreadyExistsError: something of that name is there; ``staged`` stays where it is.
        StorageError: nothing was committed.
    """
    sync_tree(staged)
    try:
        if final.exists():  # an empty directory would be replaced without an error
            raise AlreadyExistsError(f"{final} was already committed by another writer")
        try:
            current().rename(staged, final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise AlreadyExistsError(f"{final} was already committed by another writer") from None
            if staged.exists() or not final.exists():  # else only the reply was lost
                raise
        current().sync_directory(final.parent)
    except OSError as error:
        raise storage_error(final, error) from error
