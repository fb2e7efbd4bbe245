"""Where the worked recipes and sites lie that come with milesbatch. Reads nothing.

In a checkout they are beside the package; a wheel puts them under ``share/milesbatch`` of the environment (``data-files``
in ``pyproject.toml``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import milesbatch


def shipped_recipes() -> Path:
    """The folder of the shipped recipes; it need not exist."""
    return _shipped("recipes", "recipes")


def shipped_sites() -> Path:
    """The folder of the worked examples of sites; it need not exist."""
    return _shipped("slurm/sites", "sites")


def _shipped(in_checkout: str, installed: str) -> Path:
    beside = Path(milesbatch.__file__).parents[1]
    if (beside / "pyproject.toml").is_file():
        return beside / in_checkout
    return Path(sys.prefix) / "share" / "milesbatch" / installed
