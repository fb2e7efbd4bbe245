"""Values of Arrow as values of JSON. Pure.

Invariant: what JSON has no number for (NaN, infinities) is null; times are ISO 8601, bytes hexadecimal, maps objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa


def plain_rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Each row of record batches as a JSON object, the columns in their order."""
    for batch in batches:
        maps = [field.name for field in batch.schema if pa.types.is_map(field.type)]
        for row in batch.to_pylist():
            for name in maps:
                row[name] = None if row[name] is None else {str(key): value for key, value in row[name]}
            yield {name: plain(value) for name, value in row.items()}


def plain(value: Any) -> Any:
    """One value; containers are copied."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def _number(value: Decimal) -> int | float | None:
    if not value.is_finite():
        return None
    return int(value) if value == value.to_integral_value() else float(value)
