"""Is a run queued, running, or over? From its files, its living controller, and Slurm where the run was submitted.

Owns: that judgement, for people. Never: what happens next (``decisions/going_on.py``). Invariant: a controller that cannot
be judged from here is *unknown*, never dead and never well.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from enum import Enum
from typing import Any

from milesbatch.cluster import slurm
from milesbatch.decisions.job_states import JobState
from milesbatch.errors import EXIT_NOT_WELL, EXIT_TEMPFAIL, SlurmError
from milesbatch.records import IncarnationRecord
from milesbatch.report.endings import (
    Failure,
    batch_error,
    ended_before,
    failure_of,
    killed_controller,
    last_word,
    lost_controller,
)
from milesbatch.report.queue import QueueView, ask_queue
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import is_alive, read_hint

_ASK_S = 2.0
_WATCH_S = 3.0


class Life(Enum):
    """What is known of the newest incarnation's controller."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """A run's state and what it follows from."""

    state: str
    """``queued running draining stopped finished failed unknown``."""
    life: Life
    queue: QueueView
    live: dict[str, Any] | None = None
    """The living controller's own view."""
    note: str | None = None
    """What could not be known, or what is about to happen."""
    cause: str | None = None
    """Why it is over, unless it ended well or was asked to stop."""
    failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Nothing runs, and nothing starts by itself, as far as can be known."""
        over = self.state in ("finished", "failed", "stopped") and self.life is not Life.ALIVE
        return over and self.queue.error is None

    @property
    def exit_code(self) -> int:
        """That of the command that waited for the run's end."""
        return {"finished": 0, "failed": EXIT_NOT_WELL}.get(self.state, EXIT_TEMPFAIL)


@dataclass(slots=True)
class _Facts:
    """What was found, one after the other."""

    layout: RunLayout
    record: IncarnationRecord | None
    queue: QueueView
    word: dict[str, Any]
    life: Life = Life.GONE
    live: dict[str, Any] | None = None
    slurms_word: str = ""
    """How the newest incarnation's job ended, when Slurm was asked and knew."""
    outside: Failure | None = None
    """A bad end of a job outside of any incarnation, once it was looked for."""


def look(layout: RunLayout, record: IncarnationRecord | None, has_finished: bool) -> Condition:
    """The condition now; ``record`` is the newest incarnation's. Takes seconds when its controller is on another host."""
    facts = _Facts(layout, record, ask_queue(layout), last_word(layout, record))
    if record is not None:
        _look_for_life(facts, record)
    state, note = _judge(facts, has_finished)
    cause, failure = _why(facts, state)
    return Condition(state, facts.life, facts.queue, facts.live, note, cause, failure)


# -- life -----------------------------------------------------------------------------------------------------------------


def _look_for_life(facts: _Facts, record: IncarnationRecord) -> None:
    if record.host != socket.gethostname():
        facts.life = _life_elsewhere(facts, record)
    elif is_alive(facts.layout, record):
        facts.life, facts.live = Life.ALIVE, _ask_controller(facts.layout, record)
    elif not facts.word:
        _ask_for_job(facts, record)


def _life_elsewhere(facts: _Facts, record: IncarnationRecord) -> Life:
    """The controller itself, its hint, its last word, its job: whatever proves something first."""
    if facts.word:
        return Life.GONE
    facts.live = _ask_controller(facts.layout, record)
    if facts.live is not None or is_alive(facts.layout, record, watch_s=_WATCH_S):
        return Life.ALIVE
    return Life.GONE if _ask_for_job(facts, record) else Life.UNKNOWN


def _ask_for_job(facts: _Facts, record: IncarnationRecord) -> bool:
    """Does Slurm say that the incarnation's job has ended since, or was started again?"""
    if not facts.queue.was_asked or facts.queue.error is not None or not record.job_id.isdigit():
        return False
    try:
        job = slurm.job(record.job_id)
    except SlurmError:
        return False
    if not job:
        return True  # Slurm forgets a job only some time after its end
    if job[0].state.is_over:
        facts.slurms_word = job[0].raw_state
    return job[0].state.is_over or job[0].state is JobState.PENDING or job[0].restarts > record.restart_count


def _ask_controller(layout: RunLayout, record: IncarnationRecord) -> dict[str, Any] | None:
    hint = read_hint(layout, record.incarnation)
    if not hint:
        return None
    try:
        with urllib.request.urlopen(f"{hint['address']}/v1/status", timeout=_ASK_S) as answer:
            body = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError, KeyError):
        return None
    return body if isinstance(body, dict) else None


# -- state ----------------------------------------------------------------------------------------------------------------


def _judge(facts: _Facts, has_finished: bool) -> tuple[str, str | None]:
    """State and note."""
    jobs = facts.queue.of_role("run")
    pending = [job for job in jobs if job.state is JobState.PENDING]
    if facts.life is Life.ALIVE and not has_finished:
        return _alive(facts)
    if facts.life is not Life.ALIVE and pending:  # a finished run too: it was submitted again, for more steps
        return "queued", f"job {pending[-1].job_id} is pending ({pending[-1].reason})"
    if has_finished:
        return "finished", None
    own = None if facts.record is None or facts.life is Life.GONE else facts.record.job_id
    starting = [job for job in jobs if job.state is JobState.LIVE and job.job_id != own]
    if starting:
        return "running", f"job {starting[-1].job_id} runs; its controller has not taken the run over yet"
    if facts.life is Life.UNKNOWN and facts.record is not None:
        where = f"incarnation {facts.record.incarnation} on {facts.record.host} (job {facts.record.job_id})"
        return "unknown", f"{where} shows no sign of life that can be seen from this host; that proves nothing"
    return _over(facts), _ending_note(facts)


def _alive(facts: _Facts) -> tuple[str, str | None]:
    if facts.word:
        return "draining", f"its controller has {facts.word['event']}, and ends its processes"
    if facts.live is None:
        return "running", "its controller does not answer from here"
    return str(facts.live["state"]), None


def _over(facts: _Facts) -> str:
    if facts.word.get("event") == "failed":
        return "failed"
    facts.outside = _error_since(facts) or _never_began(facts)
    return "stopped" if facts.outside is None else "failed"


def _error_since(facts: _Facts) -> Failure | None:
    """A batch job's error that is newer than the newest incarnation's last word."""
    since = str(facts.word.get("at") or (facts.record.started_at if facts.record else ""))
    if not facts.queue.was_asked:
        return None
    return batch_error(facts.layout, since)


def _never_began(facts: _Facts) -> Failure | None:
    """The end of a job before the run had any controller."""
    if facts.record is not None or not facts.queue.was_asked or facts.queue.of_role("run"):
        return None
    return ended_before(facts.layout, _word_on_job)


def _word_on_job(job_id: str) -> str:
    try:
        found = slurm.job(job_id)
    except SlurmError:
        return ""
    return (
        found[0].raw_state + (f" ({found[0].reason})" if found[0].reason not in ("", "None") else "") if found else ""
    )


def _ending_note(facts: _Facts) -> str | None:
    jobs = facts.queue.of_role("run")
    if jobs:
        return f"job {jobs[-1].job_id} is ending; whether Slurm starts it again shows when it has ended"
    if facts.queue.error is not None:
        return "Slurm does not answer: whether a job of this run is queued is not known"
    return None


def _why(facts: _Facts, state: str) -> tuple[str | None, Failure | None]:
    """Cause and details of a bad end."""
    if facts.record is not None and facts.word.get("event") == "failed" and state in ("failed", "draining"):
        return str(facts.word.get("error")), failure_of(facts.layout, facts.record)
    if state == "failed":
        failure = facts.outside
    elif state == "stopped" and facts.record is not None and facts.word.get("event") == "controller_killed":
        failure = killed_controller(facts.layout, facts.record, facts.word)
    elif state == "stopped" and facts.record is not None and not facts.word:
        failure = lost_controller(facts.layout, facts.record, facts.slurms_word)
    else:
        failure = None
    return (None, None) if failure is None else (failure.reason, failure)
