"""One real server for all tests of a session, and both engines behind one face."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_server import RealServer, make_model, start_server


@pytest.fixture(scope="session")
def models() -> list[Any]:
    return [make_model(seed) for seed in range(4)]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory, models: list[Any]) -> Iterator[RealServer]:
    server = start_server(tmp_path_factory.mktemp("real"), models[0])
    yield server
    server.owner.close()
