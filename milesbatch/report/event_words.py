"""Events as lines for people. A table; pure.

Invariant: an event that is not in the table is shown with all that it carries, so that nothing is hidden by a gap here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_COMMON = frozenset({"at", "mono_s", "event", "process", "incarnation"})


def event_in_words(event: Mapping[str, Any]) -> str:
    """One line."""
    name = str(event.get("event", ""))
    say = _WORDS.get(name)
    try:
        return say(event) if say is not None else _plain(name, event)
    except (KeyError, TypeError, ValueError):  # an older or newer version wrote it
        return _plain(name, event)


def _plain(name: str, event: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in event.items() if key not in _COMMON)])


def _ended(event: Mapping[str, Any]) -> str:
    host = f" on {event['host']}" if event.get("host") else ""
    said = f"; it said: {' / '.join(str(event['said']).splitlines())}" if event.get("said") else ""
    return f"{event['name']} ended{host}: {event['reason']}{said}"


def _started(event: Mapping[str, Any]) -> str:
    found = f"{event['last_batch']} steps recorded, newest version {event['last_version']}"
    return f"incarnation {event['incarnation']} begins ({event['cause']}): {found}"


def _trained(event: Mapping[str, Any]) -> str:
    figures = event["metrics"]
    again = " (replayed)" if event.get("replayed") else ""
    return f"step {event['step']}{again}: reward {figures['reward_mean']:.3f}, loss {figures.get('loss', 0.0):+.4f}"


def _evaluated(event: Mapping[str, Any]) -> str:
    reward = event["metrics"].get("eval/reward_mean")
    result = "all failed" if reward is None else f"reward {reward:.3f}"
    return f"policy version {event['version']} evaluated: {result}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "incarnation_started": _started,
    "process_started": lambda e: f"{e['name']} started, start {e['attempt']}, process {e['pid']}",
    "process_ended": _ended,
    "guest_lost": lambda e: f"{e['name']}, of another job, is silent; its work is handed out again",
    "stopping": lambda e: f"stopping: {e['text']}" + (f" (nodes {', '.join(e['nodes'])})" if e.get("nodes") else ""),
    "stopped": lambda e: f"stopped after step {e['step']}",
    "finished": lambda e: f"finished after step {e['step']}",
    "failed": lambda e: f"failed: {' / '.join(str(e['error']).splitlines())}",
    "train_step": _trained,
    "evaluation_committed": _evaluated,
    "evaluation_skipped": lambda e: f"policy version {e['version']} was not evaluated: {e['error']}",
    "evaluation_off": lambda e: f"evaluation is off for the rest of this start ({e['reason']}): {e['said']}",
    "checkpoint_committed": lambda e: f"checkpoint {e['step']} committed",
}
