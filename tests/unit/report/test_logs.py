"""Logs of several processes as one stream in time order, and as they grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_incarnation, make_layout

from milesbatch.errors import InputError
from milesbatch.report.logs import LogReader, Wanted, offset_of_last, timed
from milesbatch.store.layout import RunLayout


def at(second: int, micro: int = 0) -> str:
    return f"2026-03-01T12:00:{second:02d}.{micro:06d}Z"


def add(path: Path, *lines: str) -> None:
    with open(path, "a") as stream:
        stream.write("".join(line + "\n" for line in lines))


def add_event(layout: RunLayout, second: int, event: str, process: str = "controller-0", **more: Any) -> None:
    add(
        layout.event_log(process, 1),
        json.dumps({"at": at(second), "event": event, "process": process, "incarnation": 1, **more}),
    )


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = make_layout(tmp_path / "run")
    record = make_incarnation(1, job_id="12", started_at=at(10))
    made.incarnation(1).write_bytes(record.to_bytes())
    return made


def texts(layout: RunLayout, count: int | None = None, **wanted: Any) -> list[str]:
    reader = LogReader(layout, Wanted(**wanted))
    lines = list(reader.everything()) if count is None else reader.last(count)[0]
    return [f"{line.name}: {line.text}" for line in lines]


def test_merged_in_time_order(layout: RunLayout) -> None:
    add(layout.log("trainer-0", 1), f"{at(11)} a", f"{at(14)} d")
    add(layout.log("rollout-0", 1), f"{at(12)} b")
    add(layout.logs / "slurm-run-12.log", f"{at(9)} before", f"{at(15)} e")
    add_event(layout, 13, "process_started", name="trainer-0", attempt=1, pid=7)
    assert texts(layout) == [
        "slurm-run-12: before",
        "trainer-0: a",
        "rollout-0: b",
        "controller-0: trainer-0 started, start 1, process 7",
        "trainer-0: d",
        "slurm-run-12: e",
    ]


def test_other_files_are_left_alone(layout: RunLayout) -> None:
    add(layout.log("trainer-0", 1), f"{at(11)} a")
    add(layout.logs / "core.123", "no log")
    add(layout.logs / "slurm-x-12.log", "no log")
    assert texts(layout) == ["trainer-0: a"]


def test_roles_names_and_incarnations(layout: RunLayout) -> None:
    add(layout.log("trainer-0", 1), f"{at(11)} a")
    add(layout.log("trainer-1", 1), f"{at(12)} b")
    add(layout.log("trainer-1", 2), f"{at(32)} c")
    add(layout.log("rollout-12000", 1), f"{at(13)} guest")
    add(layout.logs / "slurm-run-12.log", f"{at(11)} first", f"{at(31)} second")
    layout.incarnation(2).write_bytes(make_incarnation(2, job_id="12", restart_count=1, started_at=at(30)).to_bytes())
    assert texts(layout, role="trainer") == ["trainer-0: a", "trainer-1: b", "trainer-1: c"]
    assert texts(layout, role="trainer-1") == ["trainer-1: b", "trainer-1: c"]
    assert texts(layout, role="rollout") == ["rollout-12000: guest"]
    assert texts(layout, role="controller", incarnation=1) == ["slurm-run-12: first"]
    assert texts(layout, incarnation=2) == ["slurm-run-12: second", "trainer-1: c"]


def test_nothing_of_the_kind_lists_what_there_is(layout: RunLayout) -> None:
    with pytest.raises(InputError, match="no logs yet"):
        texts(layout)
    add(layout.log("trainer-0", 1), f"{at(11)} a")
    for wanted in ({"role": "judge"}, {"incarnation": 4}, {"role": "trainer", "incarnation": 4}):
        with pytest.raises(InputError) as caught:
            texts(layout, **wanted)
        assert "has no log of --" in caught.value.what
        assert "roles trainer; the names trainer-0; the incarnations 1" in caught.value.mend


def test_the_last_lines(layout: RunLayout) -> None:
    add(layout.log("trainer-0", 1), *(f"{at(s)} t{s}" for s in range(10, 50, 2)))
    add(layout.log("rollout-0", 1), *(f"{at(s)} r{s}" for s in range(11, 51, 2)))
    assert texts(layout, 3) == ["rollout-0: r47", "trainer-0: t48", "rollout-0: r49"]
    assert LogReader(layout, Wanted()).last(40)[1] is False
    assert LogReader(layout, Wanted()).last(39)[1] is True


# -- lines without a time of their own ------------------------------------------------------------------------------------


def test_lines_without_a_time_stay_where_they_are() -> None:
    found = list(timed([f"{at(1)} a", "trace", f"{at(9)} b"], [], at(50)))
    assert found == [(at(1), True, "a"), (at(1), False, "trace"), (at(9), True, "b")]


def test_last_words_are_shown_when_the_end_was_noticed() -> None:
    lines = [f"{at(1)} a", "Fatal Python error", "  File x", f"{at(20)} trainer-0, start 2", "srun: Killed"]
    found = [(when, text) for when, _, text in timed(lines, [at(5), at(40)], at(50))]
    assert found[1:3] == [(at(5), "Fatal Python error"), (at(5), "  File x")]
    assert found[-1] == (at(40), "srun: Killed")


def test_a_log_without_any_time() -> None:
    assert [when for when, _, _ in timed(["module load", f"{at(7)} a"], [], at(50))] == [at(7), at(7)]
    assert [when for when, _, _ in timed(["only", "words"], [], at(50))] == [at(50), at(50)]


def test_slurms_own_time_is_used() -> None:
    lines = [
        f"{at(1)} a",
        "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2030-05-05T01:02:03 DUE TO TIME LIMIT ***",
    ]
    assert [is_own for _, is_own, _ in timed(lines, [], at(50))] == [True, True]


def test_times_never_go_back_within_a_file() -> None:
    found = list(timed([f"{at(5)} a", f"{at(3)} clock was set back", f"{at(6)} b"], [], at(50)))
    assert [when for when, _, _ in found] == [at(5), at(5), at(6)]


def test_a_progress_bar_is_shown_as_a_terminal_shows_it(layout: RunLayout) -> None:
    layout.log("trainer-0", 1).write_bytes(f"{at(1)} 10%\r50%\r100%\r\n{at(2)} \xff\n".encode("latin-1"))
    assert texts(layout) == ["trainer-0: 100%", "trainer-0: �"]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_offset_of_the_last_lines(tmp_path: Path, count: int, ending: str) -> None:
    lines = ["a" * 40_000, "b", "", "c" * 70_000, "d"]
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + ending)
    rest = path.read_bytes()[offset_of_last(path, count) :].decode()
    assert rest.splitlines() == lines[-count:]
    assert offset_of_last(tmp_path / "none", 3) == 0


# -- following ------------------------------------------------------------------------------------------------------------


def test_following_shows_each_line_once(layout: RunLayout) -> None:
    log = layout.log("trainer-0", 1)
    add(log, f"{at(11)} a", f"{at(12)} b")
    reader = LogReader(layout, Wanted(), goes_on=True)
    assert [line.text for line in reader.last(1)[0]] == ["b"]
    assert reader.new() == []
    with open(log, "a") as stream:
        stream.write(f"{at(13)} half")
    assert reader.new() == []
    with open(log, "a") as stream:
        stream.write(" whole\nno time\n")
    assert [(line.text, line.is_timed) for line in reader.new()] == [("half whole", True), ("no time", False)]


def test_following_goes_on_in_new_files_and_incarnations(layout: RunLayout) -> None:
    add(layout.log("trainer-0", 1), f"{at(11)} a")
    reader = LogReader(layout, Wanted(role="trainer"), goes_on=True)
    reader.last(10)
    layout.incarnation(2).write_bytes(make_incarnation(2, job_id="12", started_at=at(30)).to_bytes())
    add(layout.log("trainer-0", 2), f"{at(32)} c")
    add(layout.log("trainer-1", 2), f"{at(31)} b")
    add(layout.log("rollout-0", 2), f"{at(31)} not asked for")
    assert [(line.incarnation, line.name, line.text) for line in reader.new()] == [
        (2, "trainer-1", "b"),
        (2, "trainer-0", "c"),
    ]


def test_following_events(layout: RunLayout) -> None:
    add_event(layout, 11, "stopped", step=3)
    reader = LogReader(layout, Wanted(), goes_on=True)
    assert [line.text for line in reader.last(10)[0]] == ["stopped after step 3"]
    add_event(layout, 12, "finished", step=4)
    assert [line.text for line in reader.new()] == ["finished after step 4"]


def test_the_end_without_a_line_end_comes_at_last(layout: RunLayout) -> None:
    layout.log("trainer-0", 1).write_text(f"{at(11)} last words")
    assert texts(layout) == ["trainer-0: last words"]
    reader = LogReader(layout, Wanted(), goes_on=True)
    assert reader.last(10) == ([], False) and reader.new() == []
    assert [line.text for line in reader.new(rest=True)] == ["last words"]


def test_events_of_all_processes(layout: RunLayout) -> None:
    add_event(layout, 11, "ready", process="trainer-0", seconds=1.5)
    add_event(layout, 12, "failed", error="a\nb", exit_code=1)
    assert texts(layout) == ["controller-0: failed: a / b"]
    assert texts(layout, all_events=True) == ["trainer-0: ready seconds=1.5", "controller-0: failed: a / b"]
