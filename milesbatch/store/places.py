"""Where a directory is that a person named, and whether it can have that name: asked before anything is made there.

Owns the errors for paths that lead nowhere; never makes anything. Invariant: a path from here has no symbolic link in it, so
that what is renamed, compared or written down means the same directory as what was given.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from milesbatch.errors import InputError, NameTooLongError

_LONGEST_NAME = 255
"""Bytes, where the filesystem does not say."""


def true_path(path: Path) -> Path:
    """Absolute and without symbolic links; what it names need not exist.

    Raises:
        InputError: symbolic links lead in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # which of the two depends on the version of Python
        raise InputError(
            f"{path} leads nowhere: a symbolic link on the way leads back to itself",
            mend="remove that link, or give the directory itself",
        ) from error


def refuse_undecodable(path: Path, option: str) -> None:
    """Libraries that read a run's model take only names that are text.

    Raises:
        InputError: its absolute path is not valid UTF-8.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the name of the run directory {path} is not valid UTF-8", mend=f"give another one with {option}"
        ) from None


def refuse_name(path: Path, option: str, longer_by: int = 0) -> None:
    """Return when a new directory can be called like this.

    ``longer_by`` is by how many bytes its name is longer while it is made.

    Raises:
        InputError: the name has a control character, or is not valid UTF-8, or is too long.
    """
    refuse_undecodable(path, option)
    strange = [character for character in path.name if unicodedata.category(character) == "Cc"]
    if strange:
        raise InputError(
            f"the name {path.name!r} has a control character ({strange[0]!r})",
            mend=f"give a name of one line, without such characters, with {option}",
        )
    size, most = len(os.fsencode(path.name)), _longest_name(path) - longer_by
    if size > most:
        raise NameTooLongError(
            f"the name {path.name} is too long: it has {size} bytes, and may have at most {most} here",
            mend=f"give a shorter one with {option}",
        )


def _longest_name(path: Path) -> int:
    for directory in path.absolute().parents:
        try:
            return os.pathconf(directory, "PC_NAME_MAX")
        except OSError:
            continue
    return _LONGEST_NAME
