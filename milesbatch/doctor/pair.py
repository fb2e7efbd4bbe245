"""A short job on two nodes that looks at one directory from both sides: submitted, waited for, and always ended.

Owns: that job. Never: verdicts on what it measured (``judgement.py``). Invariant: when this returns, however it does, the
job is out of the queue or Slurm was told to end it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milesbatch import __version__
from milesbatch.cluster import slurm
from milesbatch.cluster.local import log_tail
from milesbatch.cluster.submission import submit_script
from milesbatch.decisions.job_states import JobState
from milesbatch.doctor.judgement import judge_pair, same_node
from milesbatch.doctor.node import LONGEST_S, PARTS, result_file
from milesbatch.doctor.trial import Ask, pair_script
from milesbatch.doctor.verdict import Check, bad, unchecked
from milesbatch.doctor.workplace import workplace
from milesbatch.errors import InputError, SlurmError, StorageError
from milesbatch.store.durable import make_directory, read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import refresh

_AREA = "nodes"
_NAME = "two nodes"
_LOOK_S = 1.0
_LATE_S = 20.0
"""For how long results are looked for after the job has ended: this host may see them late."""
_ENDING_S = 15.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    until_start_s: float
    """In the queue; then the job is taken back."""
    until_end_s: float = LONGEST_S + 30.0


def pair_checks(ask: Ask, directory: Path, patience: Patience, say: Say) -> list[Check]:
    """What two compute nodes of the site say about ``directory``."""
    try:
        with workplace(directory) as place:
            return _run(ask, place, patience, say)
    except StorageError as error:
        return [bad(_AREA, _NAME, error.what, "no run can be made here", error.mend)]
    except InputError as error:
        return [bad(_AREA, _NAME, error.what, "the site file contradicts itself", error.mend)]
    except SlurmError as error:
        return [
            bad(_AREA, _NAME, error.what, "the job of two nodes could not be run", error.mend or "see what Slurm says")
        ]


def _run(ask: Ask, place: Path, patience: Patience, say: Say) -> list[Check]:
    make_directory(RunLayout(place).logs)
    job_id = submit_script(pair_script(ask, place).text, place)
    say(f"job {job_id} examines {place} from two nodes")
    try:
        why_not = _wait(job_id, place, patience, say)
    finally:
        _end(job_id)
    if why_not is not None:
        return [why_not]
    results = {part: _result(place, part) for part in PARTS}
    if any(result is None for result in results.values()):
        return [_no_result(job_id, place)]
    examiner, servant = (dict(results[part] or {}) for part in PARTS)
    if same_node(examiner, servant):
        return [
            unchecked(_AREA, _NAME, f"Slurm gave {examiner['node']} for both parts; nothing was learnt about two nodes")
        ]
    return judge_pair(examiner, servant, __version__)


def _wait(job_id: str, place: Path, patience: Patience, say: Say) -> Check | None:
    """Until both results are there, or cannot come any more; returns why nothing can be said yet."""
    began_s = time.monotonic()
    started_s: float | None = None
    ended_s: float | None = None
    while True:
        if all(_result(place, part) is not None for part in PARTS):
            return None
        now_s, state, reason = time.monotonic(), *_state(job_id)
        if state in (JobState.LIVE, JobState.ENDING) and started_s is None:
            started_s = now_s
            say(f"it runs, for at most {LONGEST_S / 60:.0f} minutes")
        if state.is_over:
            ended_s = ended_s or now_s
            refresh(place)
            has_log = any(RunLayout(place).logs.iterdir())
            if now_s - ended_s > (_LATE_S if has_log else _ENDING_S):
                return None
        elif started_s is None and now_s - began_s > patience.until_start_s:
            why = f"job {job_id} did not start within {patience.until_start_s:.0f} s ({reason or 'no reason given'})"
            return unchecked(_AREA, _NAME, why, "--wait SECONDS waits longer")
        elif started_s is not None and now_s - started_s > patience.until_end_s:
            return bad(
                _AREA, _NAME, f"job {job_id} did not end in time", "a node hangs", f"see {RunLayout(place).logs}"
            )
        time.sleep(_LOOK_S)


def _state(job_id: str) -> tuple[JobState, str]:
    """UNKNOWN while Slurm does not answer."""
    try:
        found = slurm.job(job_id)
    except SlurmError:
        return JobState.UNKNOWN, "Slurm does not answer"
    return (found[0].state, found[0].reason) if found else (JobState.SUCCEEDED, "")


def _end(job_id: str) -> None:
    """Take the job out of the queue, and wait a little until its processes no longer write into the directory."""
    deadline_s = time.monotonic() + _ENDING_S
    try:
        slurm.cancel(job_id)
        while time.monotonic() < deadline_s and any(part.state.may_run for part in slurm.job(job_id)):
            time.sleep(0.2)
    except SlurmError:
        return  # told as well as could be; its own limits end it


def _result(place: Path, part: str) -> dict[str, Any] | None:
    data = read_optional(result_file(place, part))
    try:
        body = json.loads(data) if data else None
    except ValueError:
        return None  # not whole yet, from here
    return body if isinstance(body, dict) else None


def _no_result(job_id: str, place: Path) -> Check:
    logs = sorted(RunLayout(place).logs.iterdir())
    said = [line.strip() for log in logs for line in log_tail(log).splitlines() if line.strip()][-3:]
    if not said:
        meaning = "compute nodes do not see this directory, or cannot write to it"
        mend = "choose a directory on a filesystem that login and compute nodes share (runs_directory of the site file)"
        return bad(_AREA, _NAME, f"job {job_id} ended without a result and without a log", meaning, mend)
    meaning = "a process of a run would end the same way"
    mend = "check `python`, `setup` and `container` of the site file: is milesbatch installed there?"
    return bad(_AREA, _NAME, f"job {job_id} ended without a result; it said: {' / '.join(said)}", meaning, mend)


def no_pair(why: str, mend: str = "") -> Check:
    """What was left out."""
    return unchecked(_AREA, _NAME, why, mend)
