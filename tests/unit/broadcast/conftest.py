"""Groups meet on the loopback interface, whatever this host's name leads to."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
