"""The only caller of Slurm's commands (sbatch goes through ``submission.py``). Asks anew each time; remembers nothing.

Owns: running the commands with a time limit, and turning their text into values. Never: decisions. Invariant: "Slurm says that
the job has ended" and "Slurm does not answer" are never the same value: the second is :class:`SlurmError`, or the state UNKNOWN
where a job cannot be found. Source: man pages of squeue, scontrol, scancel and sinfo of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from milesbatch.decisions.job_states import JobState, state_of
from milesbatch.errors import SlurmError

_TIMEOUT_S = 30.0
_NO_ANSWER = (
    "Unable to contact",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "backup controller",
    "Unexpected message received",  # scontrol requeue and update of 22.05, when slurmctld is away
)
_REACH_IT = (
    "ask again later; if it never answers here, SLURM_CONF must name this cluster's configuration (the development cluster's:"
    ' `eval "$(make -s cluster-env)"`)'
)
_ABSENT = ("", "(null)", "None", "N/A", "UNKNOWN", "Unknown")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One component of a job (or the whole job, when it is not heterogeneous), as ``scontrol show job`` tells."""

    job_id: str
    """Of the whole job (its leader's, when it is heterogeneous)."""
    het_offset: int
    state: JobState
    raw_state: str
    reason: str
    nodes: str
    """In Slurm's short form; empty while it is pending."""
    restarts: int
    comment: str

    @property
    def is_at_time_limit(self) -> bool:
        """Slurm has ended it, or is ending it, for its time limit (while it ends, only the reason says so)."""
        return self.state is JobState.TIMED_OUT or (self.state is JobState.ENDING and self.reason == "TimeLimit")

    @property
    def name(self) -> str:
        return self.job_id if self.het_offset == 0 else f"{self.job_id}+{self.het_offset}"


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One component of a job in the queue, as ``squeue`` tells people."""

    job: JobFacts
    """Without its count of restarts, which squeue does not tell."""
    time_left_s: float | None
    starts_at: str
    """When it started, or is expected to; local time of the cluster, as Slurm spells it. Empty when Slurm cannot tell."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as ``scontrol show node`` tells."""

    name: str
    address: str
    state: str
    """Slurm's word, with ``*`` when the node does not respond (``ALLOCATED*``)."""

    @property
    def is_lost(self) -> bool:
        return "*" in self.state or any(word in self.state for word in ("DOWN", "FAIL", "NOT_RESPONDING"))


def run_slurm(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> str:
    """Standard output of a Slurm command.

    Raises:
        SlurmError: it failed, is not there, or did not answer in time; says the command and its words.
    """
    return ask_slurm(command, timeout_s).stdout


def ask_slurm(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """What a Slurm command said on both streams; bytes that are not UTF-8 are replaced.

    Raises:
        SlurmError: see :func:`run_slurm`.
    """
    words = " ".join(command)
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"there is no command {command[0]}",
            mend="load Slurm's client commands (PATH), or use `milesbatch run` without Slurm",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"`{words}` did not answer within {timeout_s:.0f} s", mend="ask again later", may_be_asked_again=True
        ) from error
    except OSError as error:
        raise SlurmError(f"`{words}` could not be started: {error}") from error
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()
        raise SlurmError(
            f"`{words}` ended with exit status {ended.returncode}: {said}",
            mend="see what Slurm says" if not is_unreachable(said) else _REACH_IT,
            may_be_asked_again=is_unreachable(said),
            said=said,
        )
    return ended


def is_unreachable(said: str) -> bool:
    """Do Slurm's words say that its controller did not answer?"""
    return any(word in said for word in _NO_ANSWER)


def job(job_id: str) -> tuple[JobFacts, ...]:
    """All components of a job, the leader first; empty when Slurm does not know it (any more).

    Raises:
        SlurmError: Slurm does not answer.
    """
    try:
        lines = _show_job(job_id)
    except SlurmError as error:
        if "Invalid job id" in error.what:
            return ()
        raise
    return tuple(sorted((_job_facts(line) for line in lines), key=lambda job: job.het_offset))


def my_jobs() -> list[JobFacts]:
    """All of this user's jobs in the queue, a line for each component.

    Raises:
        SlurmError: Slurm does not answer.
    """
    text = run_slurm(["squeue", "--me", "--noheader", "--states=all", "--format", "%i|%T|%r|%N|%k"])
    found = []
    for name, raw, reason, nodes, comment in _rows(text, 5):
        job_id, _, offset = name.partition("+")
        state = state_of(raw)
        if job_id.isdigit() and state.may_run:
            found.append(JobFacts(job_id, int(offset or 0), state, raw, reason, nodes, 0, comment))
    return found


def queue(timeout_s: float = _TIMEOUT_S) -> list[QueueFacts]:
    """All of this user's jobs that are not over, for people: one line for each component.

    Raises:
        SlurmError: Slurm does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--states=all", "--format", "%i|%T|%r|%N|%L|%S|%k"]
    found = []
    for name, raw, reason, nodes, left, starts_at, said in _rows(run_slurm(command, timeout_s), 7):
        job_id, _, offset = name.partition("+")
        if job_id.isdigit() and state_of(raw).may_run:
            job = JobFacts(job_id, int(offset or 0), state_of(raw), raw, reason, nodes, 0, said)
            found.append(QueueFacts(job, parse_time(left), "" if starts_at in _ABSENT else starts_at))
    return found


def job_state(job_id: str) -> JobState:
    """State of a job as a whole; ``UNKNOWN`` when Slurm does not know it (any more).

    Raises:
        SlurmError: Slurm does not answer.
    """
    found = job(job_id)
    return found[0].state if found else JobState.UNKNOWN


def time_left_s(job_id: str) -> float | None:
    """Seconds until the time limit ends the job; None when it has none, or is not running.

    Raises:
        SlurmError: Slurm does not answer.
    """
    text = run_slurm(["squeue", "--noheader", "--jobs", job_id, "--format", "%L"]).split()
    return parse_time(text[0]) if text else None


def parse_time(text: str) -> float | None:
    """Slurm's ``D-HH:MM:SS``, ``HH:MM:SS`` or ``MM:SS`` in seconds; None for words such as UNLIMITED or INVALID."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def cancel(job_id: str) -> None:
    """End a job, whatever its state. One that has ended already is fine.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    try:
        run_slurm(["scancel", job_id])
    except SlurmError as error:
        if "Invalid job id" not in error.what and "already" not in error.what:
            raise


def kill(job_id: str) -> None:
    """SIGKILL to the batch script and all steps of a job; one that is not running is fine.

    Raises:
        SlurmError: Slurm does not answer.
    """
    try:
        run_slurm(["scancel", "--full", "--signal=KILL", job_id])
    except SlurmError as error:
        if error.may_be_asked_again:
            raise


def signal_batch(job_id: str, name: str) -> None:
    """Send a signal to the batch script only (``USR1``).

    Raises:
        SlurmError: Slurm does not answer, or the job is not running.
    """
    run_slurm(["scancel", "--batch", f"--signal={name}", job_id])


def requeue(job_id: str) -> None:
    """Have Slurm start the job again, at once where it lets us.

    Slurm waits for two minutes by default before a requeued job may start (its credential must expire); a user may move the
    start forward.

    Raises:
        SlurmError: it is not queued again.
    """
    try:
        run_slurm(["scontrol", "requeue", job_id])
    except SlurmError as error:
        # Seen with a job that waits for a node which is gone: it says so, and requeues it all the same.
        if "Job is pending execution" not in error.what:
            raise


def start_soon(job_id: str) -> None:
    """Shorten the delay before a requeued job may start, where Slurm lets us.

    Not "now": a job that starts in the second of its requeue was seen to end with "Job credential revoked", for good, seven
    times of ten on Slurm 22.05; two seconds later it was never seen.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    run_slurm(["scontrol", "update", f"jobid={job_id}", "StartTime=now+2"])


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """A pending job (each component of it) must not use ``nodes``.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    for component in job(job_id):
        run_slurm(["scontrol", "update", f"jobid={component.name}", f"ExcNodeList={','.join(nodes)}"])


def comment(job_id: str, text: str) -> None:
    """Put a comment on a job (seen in squeue and in ``job``).

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    run_slurm(["scontrol", "update", f"jobid={job_id}", f"Comment={text}"])


def expand(nodes: str) -> tuple[str, ...]:
    """Names of a short form: ``n[1-3]`` is ``n1 n2 n3``.

    Raises:
        SlurmError: Slurm's client is not there, or the form is wrong.
    """
    return tuple(run_slurm(["scontrol", "show", "hostnames", nodes]).split())


def node(name: str) -> NodeFacts:
    """A node's address and state.

    Raises:
        SlurmError: Slurm does not answer, or has no such node.
    """
    fields = _fields(run_slurm(["scontrol", "--oneliner", "show", "node", name]))
    return NodeFacts(name, fields.get("NodeAddr", name), fields.get("State", "UNKNOWN"))


def end_step(job_id: str, step_name: str) -> None:
    """End the steps called ``step_name`` of a job with SIGKILL; none is fine.

    Raises:
        SlurmError: Slurm does not answer, or does not know the job.
    """
    # Steps of a heterogeneous job's later components go by the component's own id, and are not listed under the leader's.
    components = ",".join(_fields(line).get("JobId", job_id) for line in _show_job(job_id))
    listing = run_slurm(["squeue", "--steps", "--noheader", "--jobs", components, "--format", "%i %j"])
    for line in listing.splitlines():
        step, _, called = line.strip().partition(" ")
        if called == step_name:
            run_slurm(["scancel", "--signal=KILL", step])


def _show_job(job_id: str) -> list[str]:
    """A line for each component."""
    text = run_slurm(["scontrol", "--oneliner", "show", "job", job_id])
    return [line for line in text.splitlines() if line.strip()]


def _rows(text: str, count: int) -> list[list[str]]:
    """Lines of squeue as columns. A comment may have line breaks: what does not begin like a job belongs to the one before."""
    lines = text.splitlines()
    return [_cells(line, count) for line in lines if line is lines[0] or re.match(r"\d+(_\S+|\+\d+)?\|", line)]


def _cells(line: str, count: int) -> list[str]:
    """Columns of a line of squeue; the last one may hold the separator too."""
    cells = [cell.strip() for cell in line.split("|", count - 1)]
    if len(cells) != count:
        raise SlurmError(
            f"squeue answered {line!r}, which has not {count} columns", mend="`squeue --me` by hand says more"
        )
    return cells


def _fields(line: str) -> dict[str, str]:
    """``Key=value`` pairs of a line of scontrol; values with blanks are cut there, which hurts none that is used here."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)", line))


def _job_facts(line: str) -> JobFacts:
    fields = _fields(line)

    def said(name: str) -> str:
        value = fields.get(name, "")
        return "" if value in _ABSENT else value

    def number(name: str) -> int:
        value = said(name)
        return int(value) if value.isdigit() else 0

    leader = said("HetJobId") or said("JobId")
    if not leader:
        raise SlurmError(
            f"scontrol answered {line[:80]!r}, which tells no job", mend="`scontrol show job` by hand says more"
        )
    raw = fields.get("JobState", "UNKNOWN")
    return JobFacts(
        job_id=leader,
        het_offset=number("HetJobOffset"),
        state=state_of(raw),
        raw_state=raw,
        reason=said("Reason"),
        nodes=said("NodeList"),
        restarts=number("Restarts"),
        comment=said("Comment"),
    )
