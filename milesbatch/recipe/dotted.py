"""Nested values as dotted paths: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dotted(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted path, in the order of the mappings; a list is one leaf, and so is an empty mapping."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(dotted(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
