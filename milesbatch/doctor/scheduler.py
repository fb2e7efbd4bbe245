"""What a Slurm's configuration means for runs, from ``scontrol show config`` and ``scontrol show partition``. Reads only.

Owns: which settings matter, and why. Never: what happens to a job of ours (``trial.py``, ``pair.py``). Invariant: a setting
that is absent is judged by Slurm's own default. Source: slurm.conf(5), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from milesbatch.cluster.slurm import parse_time, run_slurm
from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn
from milesbatch.errors import SlurmError
from milesbatch.recipe.site import Site

_AREA = "slurm"
_OLDEST = (21, 8)
_NEWEST_KNOWN = (24, 11)
_SLOW_DOWN_S = 120
_OWN_EXITS = frozenset({1, 2, 75})
"""With which our batch process ends when the job must not be started again by itself."""


def scheduler_checks(site: Site) -> list[Check]:
    """Version, features and partitions; one check when Slurm does not answer."""
    try:
        config = parse_config(run_slurm(["scontrol", "show", "config"]))
        partitions = parse_partitions(run_slurm(["scontrol", "--oneliner", "show", "partition"]))
    except SlurmError as error:
        mend = error.mend or "ask the site's support"
        return [bad(_AREA, "answers", error.what, "nothing can be submitted from here", mend)]
    return [*config_checks(config, site), *partition_checks(partitions, site)]


def parse_config(text: str) -> dict[str, str]:
    """Key -> value, ``(null)`` as empty text."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): "" if value.strip() == "(null)" else value.strip() for key, _, value in pairs}


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """Name -> its fields."""
    found = (dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines() if line.strip())
    return {fields["PartitionName"]: fields for fields in found if "PartitionName" in fields}


# -- configuration --------------------------------------------------------------------------------------------------------


def config_checks(config: Mapping[str, str], site: Site) -> list[Check]:
    """What the configuration allows, and how long things take with it."""
    return [
        _version(config),
        _starting(config, site),
        _requeue(config),
        _exit_codes(config),
        _preemption(config),
        _node_loss(config),
        _ending(config),
        _memory_of_jobs(config),
        _selection(config),
    ]


def _version(config: Mapping[str, str]) -> Check:
    text = config.get("SLURM_VERSION", "")
    found = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if found < _OLDEST:
        return warn(
            _AREA, "version", text or "unknown", "older than any that was tried", "try the pair of nodes (no --no-job)"
        )
    if found > _NEWEST_KNOWN:
        return warn(
            _AREA, "version", text, "newer than any whose manual was read", "try the pair of nodes (no --no-job)"
        )
    return ok(_AREA, "version", text)


def _starting(config: Mapping[str, str], site: Site) -> Check:
    """Heterogeneous jobs start only in the backfill scheduler's rounds."""
    name = "starting heterogeneous jobs"
    if "het" not in site.shapes:
        return ok(_AREA, name, f"the site runs {' and '.join(site.shapes)} jobs only")
    if config.get("SchedulerType") != "sched/backfill":
        meaning = "heterogeneous jobs start only through the backfill scheduler: they would wait for ever"
        mend = "leave `het` out of `shapes` in the site file"
        return bad(_AREA, name, config.get("SchedulerType", "unknown"), meaning, mend)
    options = options_of(config.get("SchedulerParameters", ""))
    interval_s = options.get("bf_interval", "30")
    if "bf_hetjob_immediate" not in options:
        meaning = f"a heterogeneous job starts in a round of the scheduler, every {interval_s} s or more, also after a requeue"
        mend = "fine for long jobs; else ask for bf_hetjob_immediate, or take slurm.shape: single or separate"
        return warn(_AREA, name, "bf_hetjob_immediate is not set", meaning, mend)
    return ok(_AREA, name, f"bf_hetjob_immediate, rounds every {interval_s} s")


def _requeue(config: Mapping[str, str]) -> Check:
    options = options_of(config.get("AuthInfo", ""))
    delay = options.get("cred_expire", "120")
    found = f"JobRequeue={config.get('JobRequeue', '?')}; a requeued job may start again after {delay} s, or when it asks to"
    if config.get("JobRequeue") == "0":
        return ok(_AREA, "requeue", f"{found}; our jobs ask for it themselves (--requeue)")
    return ok(_AREA, "requeue", found)


def _exit_codes(config: Mapping[str, str]) -> Check:
    texts = [config.get(key, "") for key in ("RequeueExit", "RequeueExitHold")]
    numbers = {number for text in texts for number in _ranges(text)}
    if numbers & _OWN_EXITS:
        codes = ", ".join(map(str, sorted(numbers & _OWN_EXITS)))
        meaning = (
            "Slurm starts jobs again that ended with these: a failed run or a wrong recipe would be started for ever"
        )
        mend = "set slurm.requeue: false, and use `milesbatch resume`; or ask for other codes"
        return bad(_AREA, "exit codes", f"RequeueExit has {codes}", meaning, mend)
    return ok(_AREA, "exit codes", "none of ours makes Slurm start a job again")


def _preemption(config: Mapping[str, str]) -> Check:
    kind, mode = config.get("PreemptType", "preempt/none"), config.get("PreemptMode", "OFF")
    if kind == "preempt/none":
        return ok(_AREA, "preemption", "none")
    told = "preempt_send_user_signal" in options_of(
        config.get("SlurmctldParameters", "")
    ) or "send_user_signal" in options_of(config.get("PreemptParameters", ""))
    found = f"{kind}, {mode}"
    if not told:
        meaning = (
            "a preempted job is not warned by its --signal: the trainer saves only if its SIGTERM comes early enough"
        )
        mend = "keep checkpoint.every small on preemptible partitions, or ask for preempt_send_user_signal"
        return warn(_AREA, "preemption", f"{found}; no preempt_send_user_signal", meaning, mend)
    return ok(_AREA, "preemption", f"{found}; jobs are warned (preempt_send_user_signal)")


def _node_loss(config: Mapping[str, str]) -> Check:
    timeout_s, message_s = (
        _seconds(config.get(key, ""), default) for key, default in (("SlurmdTimeout", 300), ("MessageTimeout", 10))
    )
    found = f"seen after SlurmdTimeout ({timeout_s:.0f} s) and once or twice MessageTimeout ({message_s:.0f} s)"
    if timeout_s == 0 or timeout_s > _SLOW_DOWN_S:
        meaning = (
            "a run's own heartbeats notice in 15 s, and it goes on in a new job; only Slurm itself takes that long"
        )
        return warn(
            _AREA, "node loss", found, meaning, "nothing, if other nodes are free; else it is the site's to set"
        )
    return ok(_AREA, "node loss", found)


def _ending(config: Mapping[str, str]) -> Check:
    wait_s = _seconds(config.get("KillWait", ""), 30)
    found = f"between SIGTERM and SIGKILL a job has {wait_s:.0f} s (KillWait)"
    if wait_s < 5:
        meaning = "too short to save anything at a requeue or a preemption without grace"
        return warn(_AREA, "ending", found, meaning, "keep checkpoint.every small; or it is the site's to set")
    return ok(_AREA, "ending", found)


def _memory_of_jobs(config: Mapping[str, str]) -> Check:
    age_s = _seconds(config.get("MinJobAge", ""), 300)
    found = f"jobs that ended are remembered for {age_s:.0f} s (MinJobAge)"
    if age_s < 60:
        meaning = "how a job ended is soon unknown: status says so, and a take-over watches the old controller instead"
        return warn(_AREA, "memory of jobs", found, meaning, "it is the site's to set")
    return ok(_AREA, "memory of jobs", found)


def _selection(config: Mapping[str, str]) -> Check:
    kind = config.get("SelectType", "")
    if kind == "select/linear":
        meaning = "every job gets whole nodes: small groups waste them"
        return warn(_AREA, "selection", kind, meaning, "ask for as many processes as a node holds")
    return ok(_AREA, "selection", f"{kind} {config.get('SelectTypeParameters', '')}".strip())


# -- partitions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """Partitions that a role's nodes may come from."""

    role: str
    names: tuple[str, ...]


def partition_checks(partitions: Mapping[str, Mapping[str, str]], site: Site) -> list[Check]:
    """Do the site's partitions exist, and do they give what is asked for?"""
    default = tuple(name for name, fields in partitions.items() if fields.get("Default") == "YES")
    checks = []
    for role in ("trainer", "rollout"):
        said = getattr(site, role).partition
        use = _Use(role, tuple(said.split(",")) if said else default)
        if not use.names:
            mend = f"set {role}.partition in the site file"
            checks.append(
                bad(_AREA, f"{role} partition", "none is named, and there is no default", "sbatch refuses", mend)
            )
        checks += [_partition(use, name, partitions, site) for name in use.names]
    return checks


def _partition(use: _Use, name: str, partitions: Mapping[str, Mapping[str, str]], site: Site) -> Check:
    title = f"{use.role} partition {name}"
    fields = partitions.get(name)
    if fields is None:
        meaning = f"sbatch refuses; partitions that can be seen: {', '.join(sorted(partitions)) or 'none'}"
        return bad(
            _AREA,
            title,
            "does not exist, or is hidden from you",
            meaning,
            f"correct {use.role}.partition in the site file",
        )
    if fields.get("State") != "UP":
        return bad(
            _AREA, title, f"its state is {fields.get('State')}", "jobs wait until it is UP", "ask the site's support"
        )
    limit_s = parse_time(fields.get("MaxTime", ""))
    grace, mode = fields.get("GraceTime", "0"), fields.get("PreemptMode", "?")
    limit = "no time limit" if limit_s is None else f"at most {limit_s / 60:.0f} minutes"
    found = f"{fields.get('TotalNodes')} nodes, {limit}; PreemptMode={mode}, GraceTime={grace} s"
    if limit_s is not None and site.max_time_minutes is not None and site.max_time_minutes * 60 > limit_s:
        mend = f"set max_time_minutes: {limit_s / 60:.0f} in the site file"
        return bad(
            _AREA, title, found, f"the site file allows {site.max_time_minutes} minutes: such jobs never start", mend
        )
    if use.role == "trainer" and mode in ("REQUEUE", "CANCEL") and site.rollout.partition != site.trainer.partition:
        meaning = "the trainer may be preempted, which costs a restart each time"
        return warn(_AREA, title, found, meaning, "a partition that is not preempted is better for the trainer")
    return ok(_AREA, title, found)


# -- text -----------------------------------------------------------------------------------------------------------------


def options_of(text: str) -> dict[str, str]:
    """``a=1,b`` as ``{"a": "1", "b": ""}``."""
    return {key.strip(): value for key, _, value in (part.partition("=") for part in text.split(",")) if key.strip()}


def _seconds(text: str, default: float) -> float:
    match = re.match(r"\d+", text)
    return float(match[0]) if match else default


def _ranges(text: str) -> set[int]:
    """Numbers of ``1,5-7``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def no_scheduler(why: str) -> list[Check]:
    """Without a site, or without Slurm."""
    return [unchecked(_AREA, "everything about Slurm", why, "milesbatch doctor --site SITE, where Slurm is")]
