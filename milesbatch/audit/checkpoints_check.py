"""Checkpoints: every shard whole, and the manifest in agreement with the versions and fates that it repeats.

Owns nothing but reading; shards are digested, never loaded. Invariant: a checkpoint that a fenced incarnation wrote proves
nothing and breaks nothing. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.audit.findings import Findings, files_below
from milesbatch.audit.records_check import History
from milesbatch.audit.rules import Rules
from milesbatch.audit.seals_check import Lives
from milesbatch.audit.weights_check import Versions
from milesbatch.records import CheckpointManifest
from milesbatch.store.durable import is_residue
from milesbatch.store.entries import listed, numbered
from milesbatch.store.layout import RunLayout


def check_checkpoints(
    layout: RunLayout, lives: Lives, rules: Rules | None, history: History, versions: Versions, findings: Findings
) -> list[CheckpointManifest]:
    """Read every checkpoint; returns the manifests that count, ascending."""
    found: list[CheckpointManifest] = []
    for step, directory in numbered(layout.checkpoints):
        path = layout.checkpoint_manifest(step)
        manifest = findings.read_record(CheckpointManifest, path, move=directory)
        if manifest is None:
            if not path.exists() and any(listed(directory)):
                detail = "shards without a manifest: a checkpoint that was never committed, or is being deleted"
                findings.note("leftover", directory, detail, move=directory)
            continue
        if manifest.step != step:
            findings.violate("mismatch", path, f"it is the manifest of checkpoint {manifest.step}", move=directory)
            continue
        if not lives.accept(manifest.incarnation, lambda seal, step=step: step in seal.checkpoints):  # type: ignore[misc]
            detail = f"written by incarnation {manifest.incarnation} after it had been sealed; it does not count"
            findings.note("fenced", path, detail, move=directory)
            continue
        lives.check_writer(manifest.incarnation, path, findings)
        if step in lives.seal(manifest.incarnation).checkpoints:
            detail = f"written by incarnation {manifest.incarnation}, whose seal says that it existed before"
            findings.violate("seal", path, detail)
        _check_files(layout, manifest, directory, findings)
        _check_weights(layout, lives, manifest, versions, findings)
        _check_fates(layout, manifest, history, findings)
        found.append(manifest)
    _check_sealed(layout, lives, rules, [manifest.step for manifest in found], findings)
    return found


def _check_files(layout: RunLayout, manifest: CheckpointManifest, directory: Path, findings: Findings) -> None:
    path = layout.checkpoint_manifest(manifest.step)
    for ref in manifest.files:
        findings.verify(directory / ref.path, ref, move=directory, unless=lambda: not path.exists())
    named = {directory / ref.path for ref in manifest.files} | {path}
    for path in files_below(directory):
        if path not in named and not is_residue(path.name):
            findings.note("leftover", path, "the manifest does not name it", move=path)


def _check_weights(
    layout: RunLayout, lives: Lives, manifest: CheckpointManifest, versions: Versions, findings: Findings
) -> None:
    path, version = layout.checkpoint_manifest(manifest.step), manifest.policy_version
    if version != manifest.step:
        findings.violate("mismatch", path, f"checkpoint {manifest.step} holds policy version {version}")
    digest = versions.digest(version)
    if digest is None:
        weights = layout.weights_manifest(version)
        if findings.has_trouble(weights):
            return
        if manifest.incarnation == lives.newest or version <= versions.required:
            findings.violate(
                "missing", weights, f"{weights} is missing, but checkpoint {manifest.step} was taken of it"
            )
        else:
            findings.note("awaits-replay", path, versions.describe_missing(version))
    elif digest != manifest.weights_digest:
        detail = f"it states weights digest {manifest.weights_digest}, policy version {version} has {digest}"
        findings.violate("mismatch", path, detail)


def _check_fates(layout: RunLayout, manifest: CheckpointManifest, history: History, findings: Findings) -> None:
    path, step = layout.checkpoint_manifest(manifest.step), manifest.step
    record = history.records.get(step)
    if record is None:
        if step > history.last_step and not layout.batch(step).exists():
            findings.violate("missing", layout.batch(step), f"checkpoint {step} exists, its batch record does not")
        return
    if manifest.stream_position != record.stream_position:
        detail = f"it states stream position {manifest.stream_position}, batch {step} {record.stream_position}"
        findings.violate("mismatch", path, detail)
    fates = history.fates_between(manifest.fates_since, step)
    if fates is not None and dict(manifest.fates) != fates:
        odd = sorted(int(group) for group, _ in manifest.fates.items() ^ fates.items() if group.isdigit())
        detail = f"its fates of steps {manifest.fates_since + 1}..{step} are not those of the batch records: groups {odd[:5]}"
        findings.violate("fate", path, detail)
    for group in manifest.pending:
        fate = history.fates.get(group.group_id)
        if fate is not None and fate.step <= step:
            findings.violate("fate", path, f"it calls group {group.group_id} pending, which is {fate}")


def _check_sealed(layout: RunLayout, lives: Lives, rules: Rules | None, steps: list[int], findings: Findings) -> None:
    """Retention deletes older ones only, and none that is kept for ever: else a sealed checkpoint is missing."""
    newest = lives.records.get(lives.newest)
    keep_every = None if rules is None else rules.keep_every
    if newest is not None:
        keep_every = newest.recipe_changes.get("checkpoint.keep_every", keep_every)
    for step in lives.seal(lives.newest).checkpoints:
        path = layout.checkpoint_manifest(step)
        is_for_ever = isinstance(keep_every, int) and step % keep_every == 0
        if (is_for_ever or step > max(steps, default=0)) and not path.exists():
            findings.violate("missing", path, f"{path} is missing, but incarnation {lives.newest} sealed it")
