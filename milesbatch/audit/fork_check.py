"""A fork's first state: is it the state of the run that it says it was forked from?

Owns the comparison of what the fork has with the copies of the parent's own records under ``parent/``; never looks for the
parent, which need not exist any more. Invariant: weights, checkpoint and model of the fork's first step are proven by digests
that the parent wrote. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from milesbatch.audit.findings import Findings
from milesbatch.audit.rules import Identity
from milesbatch.records import (
    CheckpointManifest,
    FileRef,
    ForkedFrom,
    ForkRecord,
    Record,
    RunRecord,
    WeightsManifest,
    digest_bytes,
)
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout

R = TypeVar("R", bound=Record)
_SAME_MODEL = ("model", "tokenizer", "chat_template")


def check_fork(layout: RunLayout, identity: Identity, findings: Findings) -> None:
    """Prove that a fork began with its parent's state; nothing to do for a run that is none."""
    fork = identity.forked_from
    if fork is None:
        if identity.run_id is not None and layout.fork.exists():
            findings.violate("mismatch", layout.run_record, "it does not say that this run is a fork; fork.json does")
        return
    record = _must_read(ForkRecord, layout.fork, findings)
    if record is not None and record.forked_from != fork:
        findings.violate("mismatch", layout.fork, "it tells of another state than run.json")
    parent = _must_read(RunRecord, layout.parent_run_record, findings)
    if parent is not None:
        _check_parent(layout, identity, fork, parent, findings)
    if fork.weights_digest is not None:
        _check_weights(layout, fork, findings)
    if fork.step:
        _check_checkpoint(layout, fork, findings)


def _must_read(kind: type[R], path: Path, findings: Findings) -> R | None:
    record = findings.read_record(kind, path)
    if record is None and not findings.has_trouble(path):
        findings.violate(
            "missing", path, f"{path} is missing; the first state of this fork cannot be proven without it"
        )
    return record


def _check_parent(
    layout: RunLayout, identity: Identity, fork: ForkedFrom, parent: RunRecord, findings: Findings
) -> None:
    path = layout.parent_run_record
    if parent.run_id != fork.run_id:
        findings.violate(
            "mismatch", path, f"it is the record of run {parent.run_id}; this run was forked from {fork.run_id}"
        )
    for name in _SAME_MODEL:
        own, theirs = identity.fingerprints.get(name), parent.fingerprints.get(name)
        if own != theirs:
            findings.violate("mismatch", layout.run_record, f"its {name} is {own}, that of the parent {theirs}")


def _check_weights(layout: RunLayout, fork: ForkedFrom, findings: Findings) -> None:
    parent = _must_read(WeightsManifest, layout.parent_weights, findings)
    if parent is not None and (parent.version, parent.weights_digest) != (fork.step, fork.weights_digest):
        detail = f"it is of policy version {parent.version} with {parent.weights_digest}; run.json says {fork.weights_digest}"
        findings.violate("mismatch", layout.parent_weights, detail)
    path = layout.weights_manifest(fork.step)
    own = findings.read_record(WeightsManifest, path)
    if own is not None and own.weights_digest != fork.weights_digest:
        detail = f"it has weights digest {own.weights_digest}; the fork began with the parent's {fork.weights_digest}"
        findings.violate("version", path, detail)


def _check_checkpoint(layout: RunLayout, fork: ForkedFrom, findings: Findings) -> None:
    kept = layout.parent_checkpoint
    parent = _must_read(CheckpointManifest, kept, findings)
    if parent is None:
        return
    found = digest_bytes(read_optional(kept) or b"")
    if found != fork.checkpoint_digest:
        findings.violate("mismatch", kept, f"it has {found}; run.json says {fork.checkpoint_digest}")
    if (parent.step, parent.weights_digest) != (fork.step, fork.weights_digest):
        findings.violate("mismatch", kept, f"it is of step {parent.step} with {parent.weights_digest}")
    path = layout.checkpoint_manifest(fork.step)
    own = findings.read_record(CheckpointManifest, path)
    if own is None:
        if not findings.has_trouble(path):
            findings.violate("missing", path, f"{path} is missing; the fork began with it, and it is never deleted")
    elif _contents(own.files) != _contents(parent.files):
        findings.violate("mismatch", path, "its shards are not those of the parent's checkpoint")


def _contents(files: tuple[FileRef, ...]) -> dict[str, tuple[int, str]]:
    """Shards by their names without the directory, which carries the number of an incarnation."""
    return {ref.path.partition("/")[2]: (ref.bytes, ref.digest) for ref in files}
