"""The event log: whole lines only, whatever was cut off before."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_layout

from milesbatch.errors import StorageError
from milesbatch.store.clock import utc_now
from milesbatch.store.events import EventLog, read_events
from milesbatch.store.layout import RunLayout


def names(path: Path, offset: int = 0) -> list[str]:
    return [event["event"] for event, _ in read_events(path, offset)]


def test_events_are_read_again_and_followed(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    log = EventLog(layout, "trainer-0", 3)
    path = layout.event_log("trainer-0", 3)
    log.write("one", text="é\n☃", path=Path("/x"))
    ((event, offset),) = read_events(path)
    assert (event["event"], event["process"], event["incarnation"]) == ("one", "trainer-0", 3)
    assert (event["text"], event["path"]) == ("é\n☃", "/x")
    assert set(event) == {"at", "mono_s", "event", "process", "incarnation", "text", "path"}
    log.write("two")
    assert names(path, offset) == ["two"]
    log.close()
    assert names(layout.event_log("trainer-1", 3)) == []


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    layout = make_layout(tmp_path / "run")
    path = layout.event_log("trainer-0", 1)
    log = EventLog(layout, "trainer-0", 1)
    log.write("one")
    log.write("two")
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert names(path) == ["one"]
    log = EventLog(layout, "trainer-0", 1)
    assert names(path) == ["one"]
    log.write("three")
    assert names(path)[0] == "one"
    assert names(path)[-1] == "three"
    log.close()


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"event": "a"}\nnoise\n[1]\n\xff\xfe\n\n{"event": "b"}\n{"event": ')
    assert names(path) == ["a", "b"]


def test_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"trainer-0\.i000001\.jsonl"):
        EventLog(RunLayout(tmp_path / "none"), "trainer-0", 1)


def test_the_clock_has_one_text_form() -> None:
    assert len({len(utc_now()) for _ in range(50)}) == 1
    assert utc_now() <= utc_now()
    assert utc_now().endswith("Z")
