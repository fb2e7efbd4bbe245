"""Wall time for records and events: UTC, one text form. Durations are measured with ``time.monotonic`` instead."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """Now, as ``2026-03-01T12:34:56.789012Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
