"""A run's status as rows for a terminal: all of it, or as much as fits. Pure: from the status document to text.

Invariant: what is left out for want of room is counted, so that a short screen never looks like a healthy run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from milesbatch.controller.display import sparkline
from milesbatch.report.page.words import many, size

_COLOURS = {"failed": "bold red", "unknown": "bold yellow", "stopped": "yellow", "queued": "cyan", "finished": "green"}
_LABEL_WIDTH = 15
_BAR = 20
_SPARKS = 36
_CURVE = "reward curve"
_WHAT_TO_DO = "  what to do: "
_IT_SAID = "  it said: "
_LITTLE_DISK_BYTES = 10 << 30
Row = tuple[str, str]


def screen(body: dict[str, Any], *, width: int | None = None, height: int | None = None) -> Table:
    """The status as a table; with ``height`` at most so many lines, each cut at ``width``."""
    fits = height is not None
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(no_wrap=fits, overflow="ellipsis" if fits else "fold")
    if fits and width is not None:
        table.width = width
    for label, text in rows(body, height):
        style = _COLOURS.get(body["state"], "") if label == "state" else ""
        table.add_row(Text(label), Text(text, style=style))
    return table


def rows(body: dict[str, Any], most: int | None = None) -> list[Row]:
    """Label and text of each line, at most ``most`` of them."""
    head, lists = _head(body), _lists(body)
    if most is not None and len(head) + len(lists) > most:
        head = [row for row in head if row[0] != _CURVE]  # its last value stands in the row above
    if most is None:
        return [*head, *(row for _, found in lists for row in found)]
    shown: list[Row] = []
    allowed = _shares([len(found) for _, found in lists], max(most - len(head), len(lists)))
    for (is_newest_last, found), number in zip(lists, allowed, strict=True):
        shown += found if len(found) <= number else _cut(found, number, is_newest_last)
    return [*head, *shown][:most]


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Rows of each list, at least one: what short lists leave is for the long ones."""
    allowed = [1] * len(wanted)
    left = room - len(wanted)
    for served, place in enumerate(sorted(range(len(wanted)), key=lambda each: wanted[each])):
        more = min(wanted[place] - 1, left // (len(wanted) - served))
        allowed[place], left = 1 + more, left - more
    return allowed


def _cut(found: Sequence[Row], allowed: int, is_newest_last: bool) -> list[Row]:
    """``allowed`` of the rows, one of which says how many are left out."""
    left_out = len(found) - max(allowed - 1, 1)
    if allowed == 1:
        label, text = found[-1 if is_newest_last else 0]
        return [(label, f"(and {left_out} more) {text}")]
    if is_newest_last:
        return [(found[0][0], f"({left_out} earlier ones)"), *found[left_out:]]
    return [*found[: allowed - 1], ("", f"({left_out} more)")]


def _head(body: dict[str, Any]) -> list[Row]:
    version = f"{body['policy_version']}  {body['weights_digest'] or ''}"
    found = [
        ("run", _run(body)),
        *_parent(body),
        ("state", body["state"] + (f": {body['note']}" if body["note"] else "")),
        *_cause(body),
        ("step", _progress(body)),
        ("policy version", version if body["policy_version"] >= 0 else "none yet"),
        ("last checkpoint", _checkpoint(body)),
    ]
    if body["unfinished_saved"]:
        found.append(("unfinished", f"{body['unfinished_saved']} episodes are saved, to be continued"))
    if body["reward_mean"] is not None:
        lag = body["lag"]
        found.append(
            ("reward", f"{body['reward_mean']:.3f}, lag mean {lag['mean']:.2f}, max {lag['max']:.0f} versions")
        )
        if len(body["rewards"]) > 1:
            shown = min(len(body["rewards"]), _SPARKS)
            found.append((_CURVE, f"{sparkline(body['rewards'], _SPARKS)}, last {many(shown, 'step')}"))
    if body["evaluation"]:
        found.append(("evaluation", _evaluation(body["evaluation"])))
    if disk := _disk(body):
        found.append(("disk", disk))
    if body["slurm"] not in (None, "answers"):
        found.append(("slurm", f"{body['slurm']}; this is from files alone"))
    if body["waiting_for"]:
        speed = f"  ({body['tokens_per_s']:.0f} tokens/s)" if body["tokens_per_s"] else ""
        found.append(("waits for", body["waiting_for"] + speed))
    if body["queue"]:
        found.append(("queue", _queue(body["queue"])))
    return found


def _parent(body: dict[str, Any]) -> list[Row]:
    """Of a fork: where it began."""
    fork = body["forked_from"]
    return [("forked from", f"step {fork['step']} of {fork['path']} ({fork['run_id']})")] if fork else []


def _checkpoint(body: dict[str, Any]) -> str:
    """The last one, and what a death now would cost."""
    last = f"step {body['last_checkpoint_step']}" if body["last_checkpoint_step"] else "none yet"
    return f"{last}; a death now loses nothing, replays {many(body['would_be_replayed'], 'step')}"


def _evaluation(found: dict[str, Any]) -> str:
    """The last one, and the best one where that is another."""
    reward, best = found["reward_mean"], found["best_reward_mean"]
    text = f"version {found['version']}: " + ("all episodes failed" if reward is None else f"reward {reward:.3f}")
    if best is None or found["best_version"] == found["version"]:
        return f"{text} on held-out prompts"
    return f"{text}, held out; best {best:.3f} (version {found['best_version']})"


def _queue(queue: dict[str, int]) -> str:
    """Between rollout and training."""
    stale = f" ({queue['stale']} stale)" if queue["stale"] else ""
    leases = many(queue["leases"], "lease")
    return f"{many(queue['ready'], 'group')} ready{stale}, {queue['in_flight']} in flight in {leases}"


def _disk(body: dict[str, Any]) -> str:
    """What the run takes, by kind, and what is free where that is little."""
    parts = []
    if (used := body["disk_bytes"]) is not None:
        kinds = ", ".join(f"{name} {_size(used[name])}" for name in ("trajectories", "weights", "checkpoints"))
        parts.append(f"{'~' if used['is_estimate'] else ''}{_size(used['total'])}: {kinds}")
    if (free := body["disk_free_bytes"]) is not None and free < _LITTLE_DISK_BYTES:
        parts.insert(0, f"only {free / 2**30:.1f} GiB are free where the run lies")
    return "; ".join(parts)


def _size(num_bytes: int) -> str:
    """Two digits are enough here, and all kinds fit a line."""
    value, unit = size(num_bytes).split()
    return f"{float(value):.2g} {unit}" if float(value) < 10 else f"{float(value):.0f} {unit}"


def _run(body: dict[str, Any]) -> str:
    """Its identity, and how often and as which jobs it was started."""
    jobs = ", ".join(body["job_ids"]) or "none"
    return f"{body['run_id'] or '(not begun)'}, incarnation {body['incarnation']}, jobs: {jobs}"


def _progress(body: dict[str, Any]) -> str:
    """How far, as a bar too, and how much longer."""
    text = f"{body['step']} of {body['steps']}"
    if not body["steps"]:
        return text
    full = min(body["step"] * _BAR // body["steps"], _BAR)
    left = "" if body["seconds_left"] is None else f", about {duration(body['seconds_left'])} left"
    return f"{text}  {'█' * full}{'░' * (_BAR - full)}{left}"


def _cause(body: dict[str, Any]) -> list[Row]:
    if not body["cause"]:
        return []
    cause, failure = str(body["cause"]), body["failure"] or {}
    said = [line for line in failure.get("lines", ()) if line.removeprefix("error: ") not in cause]
    found = [_labelled(line) for line in cause.splitlines() if not line.startswith(_WHAT_TO_DO)][:4]
    if failure:
        where = f" on {failure['host']}" if failure["host"] else ""
        log = f"; see {failure['log']}" if failure["log"] else ""
        how = _how_it_ended(failure, cause)
        found.append(("  who", f"{failure['name']}{where}" + (f", {how}" if how else "") + log))
        found += [("  it said", line) for line in said if not line.startswith(_WHAT_TO_DO)]
    mends = [line for line in (*cause.splitlines(), *said) if line.startswith(_WHAT_TO_DO)] or [failure.get("try", "")]
    return found + [("  to try", mend.removeprefix(_WHAT_TO_DO)) for mend in mends if mend]


def _labelled(line: str) -> Row:
    """A line of a cause; one that repeats what somebody said, as such."""
    return ("  it said", line.removeprefix(_IT_SAID)) if line.startswith(_IT_SAID) else ("cause", line)


def _how_it_ended(failure: dict[str, Any], cause: str) -> str:
    """Reason and exit status, where the cause does not name them, and neither repeats the other."""
    code, reason = failure["exit_code"], failure["reason"]
    status = "" if code is None or code < 0 else f"exit status {code}"  # of a signal the reason tells
    if reason in cause:
        return status
    return reason if reason.startswith(status) else f"{status}: {reason}"


def _lists(body: dict[str, Any]) -> list[tuple[bool, list[Row]]]:
    """Groups of rows of one kind, and whether the last ones matter most."""
    found = [
        (False, [("  job", job_in_words(job)) for job in body["jobs"]]),
        (
            True,
            [("  restart", f"incarnation {r['incarnation']}, {r['at'][:19]}Z: {r['cause']}") for r in body["restarts"]],
        ),
        (True, [("  died", _end_in_words(end)) for end in body["process_ends"]]),
        (
            True,
            [
                ("  excluded", f"{node['node']}, {node['at'][:19]}Z: {node['reason']}")
                for node in body["excluded_nodes"]
            ],
        ),
        (False, [(f"  {worker['name']}", _worker_in_words(worker)) for worker in body["workers"]]),
        (True, [("  event", f"{event['at'][11:19]}Z {event['text']}") for event in body["events"]]),
    ]
    return [(is_newest_last, group) for is_newest_last, group in found if group]


def job_in_words(job: dict[str, Any]) -> str:
    """One job of the queue."""
    text = f"{job['job_id']} ({job['role']}) {job['state']}"
    if job["nodes"]:
        text += f" on {job['nodes']}"
    if job["state"] == "pending":
        text += f" ({job['reason']})" + (f", expected to start {job['starts_at']}" if job["starts_at"] else "")
    elif job["time_left_s"] is not None:
        text += f", {duration(job['time_left_s'])} left"
    return text


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _end_in_words(end: dict[str, Any]) -> str:
    where = f" on {end['host']}" if end["host"] else ""
    said = f"; it said: {str(end['said']).splitlines()[0]}" if end["said"] else ""
    return f"{end['at'][:19]}Z {end['name']}{where}: {end['reason']}{said}"


def _worker_in_words(worker: dict[str, Any]) -> str:
    where = f" on {worker['host']}" if worker.get("host") else ""
    version = f"version {worker['policy_version']}" if worker["policy_version"] >= 0 else "no version yet"
    leases = worker.get("leases")  # a controller of an older version does not say
    groups = "" if leases is None else f" of {many(worker['groups_in_flight'], 'group')} ({many(leases, 'lease')})"
    servers = f"; {worker['servers']}" if worker.get("servers") else ""
    return f"{worker['state']}, {version}; {many(worker['samples_in_flight'], 'sample')}{groups}{where}{servers}"
