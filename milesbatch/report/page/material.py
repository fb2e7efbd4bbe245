"""Gathers what the page is made of, and says what could not be read.

Owns: reading, each part on its own. Never: what is shown of it. Invariant: a missing or damaged input costs its own part of the
page and is told in ``gaps``; the page is still made. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from milesbatch.audit.prove import audit_run
from milesbatch.audit.verdict import Verdict
from milesbatch.errors import MilesbatchError
from milesbatch.evaluation.reader import Curve
from milesbatch.records import IncarnationRecord
from milesbatch.report.lineage import Lineage, read_lineage
from milesbatch.report.page.changes import MOST_VERSIONS
from milesbatch.report.page.evaluations import read_curves
from milesbatch.report.page.experience import Experience, look_at_experience
from milesbatch.report.page.samples import Shown, read_chosen
from milesbatch.report.page.versions import VersionRow, list_versions
from milesbatch.report.status import run_status
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_run_record
from milesbatch.timeline.evidence import Evidence, read_evidence
from milesbatch.timeline.slices import Story, tell
from milesbatch.timeline.troubles import Trouble, find_troubles
from milesbatch.weights.changes import Changes, read_changes

T = TypeVar("T")
_MOST_INCARNATIONS = 100_000


@dataclass(slots=True)
class Material:
    """A run, as far as it can be read."""

    name: str
    made_at: str
    status: dict[str, Any] | None
    incarnations: list[IncarnationRecord]
    evidence: Evidence
    story: Story
    troubles: list[Trouble]
    experience: Experience
    samples: list[Shown]
    versions: list[VersionRow]
    changes: Changes
    evaluations: list[Curve]
    recipe: str
    verdict: Verdict | None
    was_audited: bool
    lineage: Lineage | None = None
    gaps: list[str] = field(default_factory=list)


def gather(layout: RunLayout, made_at: str, *, with_audit: bool, tell_progress: Callable[[str], None]) -> Material:
    """Read the run. ``with_audit`` reads every committed byte of it, which takes as long as that takes."""
    gaps: list[str] = []
    incarnations = _incarnations(layout, gaps)
    evidence = read_evidence(layout, len(incarnations))
    gaps += evidence.gaps
    story = tell(evidence)
    experience = look_at_experience(layout)
    gaps += experience.gaps
    samples = read_chosen(experience, gaps)
    versions, unread = list_versions(layout, evidence)
    gaps += unread
    changes = _attempt(lambda: read_changes(layout, MOST_VERSIONS), Changes(), gaps)
    told = {gap.partition(" ")[0] for gap in gaps}
    gaps += [gap for gap in changes.gaps if gap.partition(" ")[0] not in told]
    evaluations, damaged = read_curves(layout)
    gaps += damaged
    status = _attempt(lambda: run_status(layout), None, gaps)
    recipe = _attempt(lambda: read_optional(layout.recipe), None, gaps)
    if recipe is None:
        gaps.append("recipe.yaml is missing")
    lineage = _attempt(lambda: read_lineage(layout, read_run_record(layout)), None, gaps)
    verdict = None
    if with_audit:
        tell_progress("auditing: every committed byte is read (--no-audit leaves that out)")
        verdict = _attempt(lambda: audit_run(layout), None, gaps)
    return Material(
        name=layout.root.resolve().name,
        made_at=made_at,
        status=status,
        incarnations=incarnations,
        evidence=evidence,
        story=story,
        troubles=find_troubles(evidence, story),
        experience=experience,
        samples=samples,
        versions=versions,
        changes=changes,
        evaluations=evaluations,
        recipe=(recipe or b"").decode(errors="replace"),
        verdict=verdict,
        was_audited=with_audit,
        lineage=lineage,
        gaps=list(dict.fromkeys(gap.replace(f"{layout.root}/", "") for gap in gaps)),
    )


def _attempt(read: Callable[[], T], otherwise: T, gaps: list[str]) -> T:
    try:
        return read()
    except MilesbatchError as error:
        gaps.append(error.what)
    except OSError as error:
        gaps.append(f"{error.filename}: {error.strerror}")
    return otherwise


def _incarnations(layout: RunLayout, gaps: list[str]) -> list[IncarnationRecord]:
    """Those that can be read; one that cannot is told, and the others are still shown."""
    found: list[IncarnationRecord] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(path.name for path in layout.incarnations.glob("[0-9]*.json"))
    for name in names[:_MOST_INCARNATIONS]:
        path = layout.incarnations / name
        try:
            found.append(IncarnationRecord.from_bytes(read_optional(path) or b"", str(path)))
        except MilesbatchError as error:
            gaps.append(error.what)
    missing = sorted(set(range(1, len(names) + 1)) - {record.incarnation for record in found})
    gaps += [f"the record of incarnation {number} is missing or damaged" for number in missing]
    return found
