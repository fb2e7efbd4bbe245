"""The audit of a run, from top to bottom:

    run.json, recipe, model ─> incarnations and seals ─> batch records ─> weights ─> checkpoints ─> trajectories
                                                                     evaluations; event logs ─> seconds by cause

What refers to something is read after it, but a run may grow meanwhile: what is not there yet is looked for again before it
counts as missing. Never writes; ``repair.py`` does. Imports no torch. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

from collections import Counter

from milesbatch.audit.checkpoints_check import check_checkpoints
from milesbatch.audit.evaluations_check import check_evaluations
from milesbatch.audit.findings import Findings
from milesbatch.audit.fork_check import check_fork
from milesbatch.audit.inflight_check import check_inflight
from milesbatch.audit.records_check import History, check_batches
from milesbatch.audit.rules import check_identity
from milesbatch.audit.seals_check import check_lives
from milesbatch.audit.times import Times, add_up_times
from milesbatch.audit.trajectories_check import Experience, check_trajectories
from milesbatch.audit.verdict import Groups, Verdict
from milesbatch.audit.weights_check import check_weights
from milesbatch.records import CheckpointManifest
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.entries import listed
from milesbatch.store.layout import RunLayout


def audit_run(layout: RunLayout) -> Verdict:
    """Prove the run in ``layout`` from its files; reads every committed byte once.

    Raises:
        StorageError: a directory cannot be listed.
        FormatVersionError: the run is of a newer format.
    """
    return examine(layout)[0]


def examine(layout: RunLayout) -> tuple[Verdict, Findings]:
    """:func:`audit_run`, with what a repair needs."""
    findings = Findings(layout.root)
    identity = check_identity(layout, findings)
    lives = check_lives(layout, findings, identity.origin)
    history = check_batches(layout, lives, identity.rules, findings)
    versions = check_weights(layout, lives, identity.rules, history, findings)
    checkpoints = check_checkpoints(layout, lives, identity.rules, history, versions, findings)
    check_fork(layout, identity, findings)
    experience = check_trajectories(layout, identity, lives, history, versions, findings)
    check_inflight(layout, history, findings)
    evaluations = check_evaluations(layout, findings)
    times = add_up_times(layout, findings)
    _note_temporary(layout, findings)
    divergences = checkpoints[-1].divergences if checkpoints else ()
    for step in divergences:
        detail = f"the replay of step {step} gave other weights than published; the published ones stay in use"
        findings.note("divergence", layout.weights_manifest(step), detail)
    _note_uncommitted(layout, checkpoints, times, findings)
    if layout.incarnation(lives.newest + 1).exists():
        findings.note("changed", layout.incarnation(lives.newest + 1), "it took over during the audit; audit it again")
    verdict = Verdict(
        run_id=identity.run_id,
        violations=tuple(findings.violations),
        notes=tuple(findings.notes),
        groups=_groups(history, experience),
        rejected_by_reason=dict(Counter(f.reason for f in history.fates.values() if f.reason is not None)),
        steps=history.last_step,
        first_version=versions.first,
        last_version=versions.last,
        verified_versions=versions.verified,
        checkpoints=tuple(manifest.step for manifest in checkpoints),
        incarnations=lives.newest,
        trajectories=experience.trajectories,
        evaluations=evaluations,
        generated_again=len(experience.again),
        replayed=tuple(times.replayed),
        divergences=divergences,
        seconds=times.rounded(),
        files=findings.num_files,
        bytes=findings.num_bytes,
    )
    return verdict, findings


def _groups(history: History, experience: Experience) -> Groups:
    """A group without a fate below the position of the stream is pending too: it will be generated."""
    trained = sum(fate.reason is None for fate in history.fates.values())
    lost = history.lost | (experience.missing - experience.pending)
    first = history.origin.first_group
    gaps = {group for group in range(first, history.stream_position) if not history.is_decided(group)}
    return Groups(
        trained=trained,
        rejected=len(history.fates) - trained,
        pending=len((experience.pending | gaps) - lost),
        lost=len(lost),
        repeated=len(history.repeated),
    )


def _note_temporary(layout: RunLayout, findings: Findings) -> None:
    parents = (layout.weights, layout.checkpoints, layout.evaluations)
    nested = [path for parent in parents for path in listed(parent) if path.is_dir()]
    for directory in (layout.root, *layout.directories(), *nested):
        for path in listed(directory):
            if path.name.startswith(TEMPORARY_PREFIX):
                findings.note("leftover", path, "an unfinished file; the next start removes it")


def _note_uncommitted(
    layout: RunLayout, checkpoints: list[CheckpointManifest], times: Times, findings: Findings
) -> None:
    newest = max(times.checkpoints, default=0)
    path = layout.checkpoint_manifest(newest)
    if newest > max((manifest.step for manifest in checkpoints), default=0) and not path.exists():
        findings.note("diagnosis", path, f"the event log says that checkpoint {newest} was committed; it is not there")
