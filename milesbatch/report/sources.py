"""The logs that a run has: which file, of whom, of which incarnation. Reads names and ends of files only.

Owns: the forms of log names. Never: merging (``logs.py``). Invariant: a file that is not a log of the run's own processes
or batch jobs is left alone. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from milesbatch.store.durable import storage_error
from milesbatch.store.layout import RunLayout

_ROLE_LOG = re.compile(r"(?P<name>[a-z]+-\d+)\.i(?P<incarnation>\d+)\.log")
_BATCH_LOG = re.compile(r"slurm-(?P<role>run|rollout)-(?P<job_id>\d+)\.log")
_EVENT_LOG = re.compile(r"(?P<name>[a-z]+-\d+)\.i(?P<incarnation>\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """One log file."""

    path: Path
    name: str
    """``trainer-0``, ``controller-0``, or ``slurm-run-12`` for the output of a batch job."""
    role: str
    """``controller``, ``trainer``, ``rollout``, ``tracking``, ``evaluation``."""
    incarnation: int | None
    """None: lines of several incarnations may be in it."""
    job_id: str = ""
    """Of a batch job's output."""
    is_events: bool = False


def list_sources(layout: RunLayout, *, all_events: bool = False) -> list[Source]:
    """All logs there are now: role processes', batch jobs', and the controllers' events (with ``all_events`` everybody's).

    Raises:
        StorageError: a directory is there and cannot be listed.
    """
    found = [source for path in _listing(layout.logs) if (source := _text_source(path)) is not None]
    for path in _listing(layout.events):
        match = _EVENT_LOG.fullmatch(path.name)
        if match is not None and (all_events or match["name"] == "controller-0"):
            role = match["name"].rpartition("-")[0]
            found.append(Source(path, match["name"], role, int(match["incarnation"]), is_events=True))
    return found


def batch_logs(layout: RunLayout) -> list[Source]:
    """Outputs of the batch jobs that held the controller, the newest job last."""
    found = [source for path in _listing(layout.logs) if (source := _text_source(path)) is not None]
    return sorted((source for source in found if source.name.startswith("slurm-run-")), key=lambda s: int(s.job_id))


def read_tail(path: Path, max_bytes: int) -> str:
    """The end of a log, from the beginning of a line on; empty when there is no such file."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - max_bytes))
            data = stream.read()
    except OSError:
        return ""
    return (data if size <= max_bytes else data.partition(b"\n")[2]).decode(errors="replace")


def _text_source(path: Path) -> Source | None:
    if match := _ROLE_LOG.fullmatch(path.name):
        return Source(path, match["name"], match["name"].rpartition("-")[0], int(match["incarnation"]))
    if match := _BATCH_LOG.fullmatch(path.name):
        role = "controller" if match["role"] == "run" else "rollout"
        return Source(path, path.stem, role, None, match["job_id"])
    return None


def _listing(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(directory, error) from error
