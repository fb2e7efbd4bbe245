"""What a process said last is its own: neither Slurm's words nor those of its servers."""

from __future__ import annotations

from milesbatch.cluster.last_words import last_error, of_servers, own_error
from milesbatch.report.endings import decisive_lines

SERVERS = of_servers("rollout-0.server-0 ended (exit status 1): it said\nerror: no such model\nValueError: of a server")


def test_every_line_about_servers_is_marked() -> None:
    assert [line.split(": ")[0] for line in SERVERS.splitlines()] == ["servers"] * 3


def test_a_killed_worker_has_no_last_words_when_only_its_servers_spoke() -> None:
    assert last_error(SERVERS) == own_error(SERVERS) == ""
    assert decisive_lines(SERVERS) == ()


def test_its_own_words_count_wherever_servers_spoke() -> None:
    assert last_error(f"following version 3\n{SERVERS}\n") == "following version 3"
    assert last_error(f"error: the engine has failed\n{SERVERS}") == "the engine has failed"
    assert decisive_lines(f"error: the engine has failed\n{SERVERS}\nslurmstepd: bye") == (
        "error: the engine has failed",
    )
