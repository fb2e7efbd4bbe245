"""When the share of changed elements of a version is unusual: the same rule live (the trainer's warnings) and afterwards (what
``milesbatch weights stats`` and the report mark). Pure.

*Share* or *density*: elements whose bits differ from the version before, of all elements.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Literal

USUAL_OF = 20
"""Versions whose median share is the usual one."""
FAR_OFF = 5.0
"""A share of more than so many times the usual one, or of less than that part of it, stands out."""
_LEAST_BEFORE = 5
"""Versions that make a usual."""


def usual_share(before: Collection[float]) -> float | None:
    """The usual share, of the last ``USUAL_OF`` versions; None where there are too few to have one."""
    return statistics.median(before) if len(before) >= _LEAST_BEFORE else None


def how_odd(share: float, usual: float | None) -> Literal["dense", "sparse"] | None:
    """Does ``share`` stand out, and how? Nothing does where nothing, or 0, is usual."""
    if not usual:
        return None
    if share > FAR_OFF * usual:
        return "dense"
    return "sparse" if share < usual / FAR_OFF else None
