"""Paths inside installed Python packages: ``package:NAME/BELOW``. Looks for the package, and imports nothing.

Owns the meaning of the prefix, for models and for prompt files. Invariant: what it returns lies inside the package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path, PurePosixPath

PREFIX = "package:"


def package_path(text: str) -> Path:
    """The place that ``text`` names, whether or not something is there.

    Raises:
        LookupError: no such package is installed; the argument is its name.
        ValueError: it leaves the package.
    """
    name, _, below = text.removeprefix(PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(name)
    if ".." in PurePosixPath(below).parts:
        raise ValueError("it leaves the package")
    return Path(next(iter(spec.submodule_search_locations))) / below
