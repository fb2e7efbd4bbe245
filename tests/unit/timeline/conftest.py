"""A run directory with the events of two faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_layout
from events_made import two_faults

from milesbatch.store.layout import RunLayout


@pytest.fixture
def faulty(tmp_path: Path) -> RunLayout:
    layout = make_layout(tmp_path / "run")
    two_faults(layout)
    return layout
