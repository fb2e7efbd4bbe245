"""What a server is given to read at its start, in a directory that may be full."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from milesbatch.engines.sglang.serving import StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.errors import EngineError


@pytest.mark.parametrize("memory", ["/dev/full/x", "file/x"])
def test_where_it_cannot_be_written_the_server_has_failed_and_not_the_run(tmp_path: Path, memory: str) -> None:
    """A server that is started again meets the space that others took; the worker must live to wait for it."""
    (tmp_path / "file").write_text("")
    settings: Any = ServerSettings(Path("/bin/true"), tmp_path, "cpu", "float32", max_length=8, max_running=1)
    place = StartedServer("server-0", settings, tmp_path / "log", tmp_path / memory)
    with pytest.raises(
        EngineError, match=r"server-0 cannot be started: .*server-0.yaml cannot be written(.|\n)*memory_dir"
    ):
        asyncio.run(place.open(5.0, lambda: None))


def test_a_full_filesystem_is_no_other_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    settings: Any = ServerSettings(Path("/bin/true"), tmp_path, "cpu", "float32", max_length=8, max_running=1)
    place = StartedServer("server-0", settings, tmp_path / "log", tmp_path / "memory")
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(EngineError, match=r"(?i)no space"):
        place._write_configuration()
