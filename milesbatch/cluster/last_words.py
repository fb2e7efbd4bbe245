"""What a dead process said last, in the text of its log. Pure; for people.

Invariant: what Slurm's commands and daemons add at the end tells of an end, and not of its cause: it counts only when there is
nothing else. What a process repeats of its servers is never its own last word.
"""

from __future__ import annotations

from collections.abc import Iterable

_SLURMS_WORDS = ("srun:", "slurmstepd")
"""How lines begin that Slurm adds to the log of a step."""


_SERVERS = "servers: "
"""How lines begin in which a process tells of its servers."""


def of_servers(text: str) -> str:
    """``text`` about servers, perhaps in the words of their logs, as lines for the log of the process that they belong to."""
    return "\n".join(_SERVERS + line for line in text.splitlines())


def without_servers_words(lines: Iterable[str]) -> list[str]:
    """The lines that are not of :func:`of_servers`."""
    return [line for line in lines if not line.startswith(_SERVERS)]


def without_slurms_words(lines: Iterable[str]) -> list[str]:
    """The lines that are not Slurm's."""
    return [line for line in lines if not line.startswith(_SLURMS_WORDS)]


def own_error(text: str) -> str:
    """What follows the last ``error: `` at the beginning of a line, with what to do about it; empty when there is none."""
    _, found, said = ("\n" + text).rpartition("\nerror: ")
    lines = without_servers_words(without_slurms_words(said.strip().splitlines()))
    return "\n".join(lines).strip() if found else ""


def last_error(text: str) -> str:
    """The decisive lines at the end of a log: :func:`own_error`, else the last line, as of a traceback."""
    if said := own_error(text):
        return said
    lines = without_servers_words(line for line in text.splitlines() if line.strip())
    return (without_slurms_words(lines) or lines)[-1].strip() if lines else ""
