"""``milesbatch audit``: prove the promises of a run from its files, and put what is broken out of the way.

Owns the words on the screen; the proof is in :mod:`milesbatch.audit`. Invariant: with ``--json`` standard output is one JSON
document and nothing else. Imports without torch. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from milesbatch.audit.findings import Finding
from milesbatch.audit.patience import examine_patiently, looks_after
from milesbatch.audit.repair import Repair, refuse_living
from milesbatch.audit.repair import repair as repair_run
from milesbatch.audit.verdict import Verdict
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL

_MOST_NOTES = 20


def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move what is broken or orphaned to quarantine/; say what comes next.")
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0, help="On a shared filesystem: seconds until violations are looked at once more."),
    ] = 60.0,
) -> None:
    """Prove a run from its files alone: fates, versions, chains, checkpoints, seals. Exit code 1 with a violation.

    Reads every committed byte, changes nothing (but with --repair), and may be used while the run is going on.
    """
    layout = find_run(run)
    if repair:
        refuse_living(layout)
    verdict, findings = examine_patiently(layout, looks_after(layout, wait_s), _tell, before_repair=repair)
    repaired = repair_run(layout, findings) if repair else None
    if as_json:
        body = verdict.to_json()
        if repaired is not None:
            moved = [{"path": path, "reason": reason} for path, reason in repaired.moved]
            body["repair"] = {"moved": moved, "next_start": list(repaired.next_start)}
        json.dump(body, sys.stdout, indent=1, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(verdict, repaired)
    if not verdict.ok:
        raise typer.Exit(EXIT_NOT_WELL)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(verdict: Verdict, repaired: Repair | None) -> None:
    console = Console()
    lines = [*_summary(verdict), *_notes(verdict.notes), *_violations(verdict.violations), *_repair(repaired)]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _summary(verdict: Verdict) -> list[str]:
    groups = verdict.groups
    seconds = ", ".join(f"{cause} {value:.1f}" for cause, value in verdict.seconds.items())
    return [
        f"run {verdict.run_id or '(unknown)'}: {verdict.steps} steps, {verdict.incarnations} incarnations",
        f"groups: {groups.trained} trained, {groups.rejected} rejected, {groups.pending} pending, {groups.lost} lost,"
        f" {groups.repeated} repeated",
        f"policy versions: {verdict.first_version} to {verdict.last_version}, {verdict.verified_versions} verified",
        f"checkpoints: {', '.join(map(str, verdict.checkpoints)) or 'none'}",
        f"work repeated: {len(verdict.replayed)} steps replayed, {verdict.generated_again} groups generated again",
        f"seconds: {seconds}",
        f"checked: {verdict.files} files, {verdict.bytes:,} bytes, {verdict.trajectories} trajectories that count"
        + (f", {verdict.evaluations} evaluations" if verdict.evaluations else ""),
    ]


def _notes(notes: tuple[Finding, ...]) -> list[str]:
    lines = [f"note: {note.path}: {note.detail}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(f"note: {len(notes) - _MOST_NOTES} more notes; --json lists all")
    return lines


def _violations(violations: tuple[Finding, ...]) -> list[str]:
    if not violations:
        return ["sound: no violation"]
    lines = [f"VIOLATION {violation.kind}: {violation.path}: {violation.detail}" for violation in violations]
    return [*lines, f"not sound: {len(violations)} violations"]


def _repair(repaired: Repair | None) -> list[str]:
    if repaired is None:
        return []
    moved = [f"moved to quarantine: {path}" for path, _ in repaired.moved] or ["nothing was moved to quarantine"]
    return [*moved, *(f"the next start {text}" for text in repaired.next_start)]
