"""Every line of a role's log carries its time, and can be read without it."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from milesbatch.cluster.stamps import (
    Stamped,
    is_stamped,
    since_last_start,
    split_stamp,
    stamp_output,
    start_line,
    without_stamps,
)

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z "


def lines(text: str) -> list[str]:
    """Lines as printed, each of which must have had a time."""
    found = text.splitlines()
    assert all(re.match(STAMP, line) for line in found), found
    return [split_stamp(line)[1] for line in found]


def test_every_line_has_its_time() -> None:
    under = io.StringIO()
    stream = Stamped(under)
    print("one\ntwo", file=stream)
    print(file=stream)
    stream.write("thr")
    stream.write("ee\n")
    stream.write("")
    assert lines(under.getvalue()) == ["one", "two", "", "three"]


def test_nothing_is_held_back() -> None:
    under = io.StringIO()
    Stamped(under).write("no end yet")
    assert under.getvalue().endswith("no end yet")
    Stamped(under).write("\n")


def test_streams_that_share_a_log_do_not_join_their_lines() -> None:
    under = io.StringIO()
    out, err = Stamped(under), Stamped(under)
    out.write("half a li")
    print("error: full", file=err)
    print("next", file=out)
    assert lines(under.getvalue()) == ["half a li", "error: full", "next"]


def test_is_a_stream_like_the_one_below() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Stamped(Terminal()).isatty() and not Stamped(io.StringIO()).isatty()
    assert is_stamped(Stamped(io.StringIO())) and not is_stamped(io.StringIO())


def test_stamping_twice_is_stamping_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under = io.StringIO()
    monkeypatch.setattr(sys, "stdout", under)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    stamp_output()
    stamp_output()
    print("once")
    assert lines(under.getvalue()) == ["once"]


SCRIPT = """
import faulthandler, sys
from milesbatch.cluster.stamps import stamp_output
stamp_output()
faulthandler.enable()
print("hello")
sys.stderr.buffer.write(b"bytes\\n")
sys.stderr.flush()
if sys.argv[1] == "raise":
    raise KeyError("lost")
faulthandler._sigsegv()
"""


def run_script(how: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-u", "-c", SCRIPT, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode
    return done.stdout.splitlines()


def test_tracebacks_have_times() -> None:
    found = run_script("raise")
    assert split_stamp(found[0])[1] == "hello" and found[1] == "bytes"
    assert all(split_stamp(line)[0] for line in found[2:])
    assert split_stamp(found[-1])[1] == "KeyError: 'lost'"


def test_a_fatal_signal_is_told_without_a_time() -> None:
    found = run_script("crash")
    assert split_stamp(found[0])[1] == "hello"
    assert "Fatal Python error: Segmentation fault" in found


def test_a_line_without_a_time() -> None:
    assert split_stamp("srun: error: n1") == (None, "srun: error: n1")
    assert split_stamp("2026-03-01T12:00:00Z other form") == (None, "2026-03-01T12:00:00Z other form")
    text = "2026-03-01T12:00:00.000001Z a\nb\n2026-03-01T12:00:00.000002Z c"
    assert without_stamps(text) == "a\nb\nc"


def test_words_of_the_last_start_only() -> None:
    first, second = start_line("trainer-1", 1, "n1", 7), start_line("trainer-1", 2, "n1", 9)
    assert since_last_start(f"{first}\nerror: old\n{second}\nsrun: killed\n") == "srun: killed\n"
    assert since_last_start(f"{first}\r\nterminal\r\n") == "terminal\r\n"
    assert since_last_start("before any start\n") == "before any start\n"
    assert since_last_start(f"{first}\n") == ""
