"""The key that running servers want to be shown, in a file that the recipe or a command names. Imports without torch.

Owns reading it, and what a key is. Invariant: the key itself stands in no message. The page behind it is
``docs/sglang.md``.
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.errors import InputError
from milesbatch.recipe.models import Recipe, SGLang

_FIELD = "rollout.sglang.key_file"
_MEND = "name a file that holds the key that the servers were started with, and that this user can read on each rollout node"


def key_of(section: SGLang) -> str:
    """What running servers want to be shown; empty: nothing.

    Raises:
        InputError: the file that holds it cannot be read, or holds no key.
    """
    return "" if section.key_file is None else key_in(Path(section.key_file), _FIELD, _MEND)


def key_in(path: Path, option: str, mend: str) -> str:
    """The key in the file that ``option`` names; what is wrong with it is mended by ``mend``.

    Raises:
        InputError: the file cannot be read, or holds no key.
    """
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        raise InputError(f"{option}: {path} cannot be read: {why}", mend=mend) from error
    if not key.isprintable() or not key or " " in key:
        raise InputError(f"{option}: {path} does not hold a key, one word", mend=mend)
    return key


def check_key(recipe: Recipe, *, may_be_elsewhere: bool) -> None:
    """Refuse now what each worker would refuse after its start. ``may_be_elsewhere``: workers run on other hosts, so a file
    that is not here tells nothing; one that is here and is wrong is wrong there too.

    Raises:
        InputError: the key of the servers that the recipe names cannot be read, or is none.
    """
    section = recipe.rollout.sglang
    if recipe.rollout.engine != "sglang" or not section.urls or section.key_file is None:
        return
    try:
        key_of(section)
    except InputError as error:
        if not (may_be_elsewhere and isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)):
            raise
