"""Bytes and time of each policy version: from manifests, the trainer's figures and the workers' events.

Owns: joining them. Never: proves anything (the audit does). Invariant: a damaged manifest costs its own row only. The page
behind it is ``docs/report.md``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from milesbatch.errors import MilesbatchError
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import Evidence
from milesbatch.timeline.numbers import duration, number, whole
from milesbatch.weights.reader import committed_versions


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One policy version."""

    version: int
    kind: str
    """``keyframe`` or ``delta``."""
    bytes: int
    published_s: float | None
    """How long publishing took; null when no event says it."""
    prepared_s: float | None
    """The longest time in which a worker fetched and verified it."""
    paused_s: float | None
    """The longest time for which decoding stood still."""
    workers: int
    """How many activations there were."""


_KIND = re.compile(rb'^ "artefact": "(\w+)"', re.MULTILINE)
_FILES = re.compile(rb'^ "files": (\[.*?^ \])', re.MULTILINE | re.DOTALL)


def list_versions(layout: RunLayout, evidence: Evidence) -> tuple[list[VersionRow], list[str]]:
    """All committed versions, ascending, and what could not be read, in words."""
    gaps: list[str] = []
    rows: list[VersionRow] = []
    published = _published(evidence)
    prepared, paused, workers = _activations(evidence)
    try:
        versions = committed_versions(layout)
    except (MilesbatchError, OSError) as error:
        return [], [str(error)]
    for version in versions:
        path = layout.weights_manifest(version)
        try:
            kind, size = _look(read_optional(path) or b"")
        except (MilesbatchError, ValueError, KeyError, TypeError) as error:
            gaps.append(f"{path.relative_to(layout.root)} cannot be read ({error})")
            continue
        rows.append(
            VersionRow(
                version, kind, size, published.get(version), prepared.get(version), paused.get(version),
                workers.get(version, 0),
            )
        )  # fmt: skip
    return rows, gaps


def _look(data: bytes) -> tuple[str, int]:
    """Kind and bytes, from the two keys of a manifest that say it: thousands of tensors per version are not looked at."""
    kind, files = _KIND.search(data), _FILES.search(data)
    if kind is None or files is None:
        raise ValueError("it is not a manifest of weights")
    return kind[1].decode(), sum(int(ref["bytes"]) for ref in json.loads(files[1]))


def _published(evidence: Evidence) -> dict[int, float]:
    found: dict[int, float] = {}
    for log in evidence.of("trainer-0"):
        for event in log.events:
            figures = event.body.get("metrics")
            step = whole(event.body.get("step"))
            if event.name == "train_step" and step is not None and isinstance(figures, dict):
                took_s = number(figures.get("weights_publish_s"))
                if took_s is not None:
                    found.setdefault(step, took_s)
    return found


def _activations(evidence: Evidence) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
    prepared: dict[int, float] = {}
    paused: dict[int, float] = {}
    workers: dict[int, int] = {}
    for log in evidence.logs:
        for event in log.events:
            version = whole(event.body.get("version"))
            if event.name == "weights_activated" and version is not None:
                prepared[version] = max(prepared.get(version, 0.0), duration(event.body.get("prepared_s")))
                paused[version] = max(paused.get(version, 0.0), duration(event.body.get("paused_s")))
                workers[version] = workers.get(version, 0) + 1
    return prepared, paused, workers
