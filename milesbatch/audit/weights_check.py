"""Policy versions: unbroken, each file whole, each chain of deltas giving each recorded weights digest.

Owns the answer to "which digest has version v?"; the proof itself is :mod:`milesbatch.audit.chain`. Invariant: a version that a
fenced incarnation wrote answers nothing. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from milesbatch.audit.chain import Chain
from milesbatch.audit.findings import Findings, ranges
from milesbatch.audit.records_check import History
from milesbatch.audit.retirement_check import Retirements
from milesbatch.audit.rules import Rules
from milesbatch.audit.seals_check import Lives
from milesbatch.errors import CorruptArtefactError
from milesbatch.records import WeightsManifest
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.entries import listed, numbered
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import read_manifest


@dataclass(slots=True)
class Versions:
    """Policy versions that count, with their weights digests."""

    layout: RunLayout
    digests: dict[int, str] = field(default_factory=dict)
    verified: int = 0
    required: int = -1
    """Versions 0 .. ``required`` must exist; later ones that are recorded may still have to be published again."""
    newest_seen: int = -1

    @property
    def first(self) -> int | None:
        return min(self.digests, default=None)

    @property
    def last(self) -> int | None:
        return max(self.digests, default=None)

    def digest(self, version: int) -> str | None:
        """Weights digest of a version; None when it does not exist, does not count or is damaged.

        A version beyond those that were listed is looked for: the run may be growing under the audit.
        """
        if version > self.newest_seen and version not in self.digests:
            try:
                manifest = read_manifest(self.layout, version)
            except CorruptArtefactError:
                return None
            if manifest is not None:
                self.digests[version] = manifest.weights_digest
        return self.digests.get(version)

    def describe_missing(self, version: int) -> str:
        return f"policy version {version} is not among the versions that count ({ranges(list(self.digests)) or 'none'})"


def check_weights(
    layout: RunLayout, lives: Lives, rules: Rules | None, history: History, findings: Findings
) -> Versions:
    """Read every policy version and prove it."""
    versions = Versions(layout)
    retirements = Retirements(layout, lives, rules, findings)
    chain = Chain(layout, findings, retirements.cover)
    kept: list[WeightsManifest] = []
    for manifest in _counting(layout, lives, history, versions, findings):
        versions.digests[manifest.version] = manifest.weights_digest
        if retirements.cover(manifest.version):
            chain.pass_over(manifest)
            retirements.note_left(manifest)
        else:
            versions.verified += chain.prove(manifest)
            kept.append(manifest.model_copy(update={"tensors": ()}))
    retirements.check_kept(kept, versions.last if versions.last is not None else -1, history.last_step)
    unproven = [v for v in chain.unproven if v >= retirements.base and not retirements.cover(v)]
    if unproven:
        first = layout.weights_manifest(unproven[0])
        detail = f"versions {ranges(unproven)} cannot be rebuilt, because a version before them cannot"
        findings.violate("chain", first, detail)
    versions.required = _required(lives, history, versions)
    for version in range(lives.origin.first_version, versions.required + 1):
        path = layout.weights_manifest(version)
        if version not in versions.digests and not path.exists():
            findings.violate("missing", path, f"{path} is missing; versions up to {versions.required} were published")
    return versions


def _required(lives: Lives, history: History, versions: Versions) -> int:
    """Newest version that must exist: step k is recorded only after step k - 1 computed, and so after version k - 2 was
    published; version k - 1 may be on its way.

    Records of earlier incarnations say nothing beyond the newest seal: what came after may have been found damaged at the
    take-over, and is then published again when its steps are replayed.
    """
    recorded = [step for step, record in history.records.items() if record.incarnation == lives.newest]
    sealed = lives.seal(lives.newest).last_version
    return max(sealed, max(recorded, default=0) - 2, versions.last if versions.last is not None else -1)


def _counting(
    layout: RunLayout, lives: Lives, history: History, versions: Versions, findings: Findings
) -> Iterator[WeightsManifest]:
    for version, directory in numbered(layout.weights):
        path = layout.weights_manifest(version)
        manifest = findings.read_record(WeightsManifest, path, move=path)
        if manifest is None:
            if not path.exists() and (contents := listed(directory)):
                detail = f"{len(contents)} files without a manifest: a publication that was never committed"
                findings.note("leftover", directory, detail, move=directory)
            continue
        versions.newest_seen = version
        if manifest.version != version:
            findings.violate("mismatch", path, f"it is the manifest of policy version {manifest.version}", move=path)
            continue
        if not lives.accept(manifest.incarnation, _covers(version)):
            detail = f"written by incarnation {manifest.incarnation} after it had been sealed; it does not count"
            findings.note("fenced", path, detail, move=path)
            continue
        lives.check_writer(manifest.incarnation, path, findings)
        _check_place(layout, lives, history, manifest, findings)
        _note_strangers(layout, manifest, findings)
        yield manifest


def _covers(version: int) -> Any:
    return lambda seal: seal.last_version >= version


def _check_place(
    layout: RunLayout, lives: Lives, history: History, manifest: WeightsManifest, findings: Findings
) -> None:
    version, path = manifest.version, layout.weights_manifest(manifest.version)
    if version <= lives.seal(manifest.incarnation).last_version:
        # Not a violation: damaged or retired payload is published again, with the same digest or not at all.
        detail = f"incarnation {manifest.incarnation} had accepted it when it began, and published it again"
        findings.note("changed", path, detail)
    record = layout.batch(version)
    if version > history.last_step and version > 0 and not record.exists():
        findings.violate("missing", record, f"{record} is missing, but policy version {version} exists")


def _note_strangers(layout: RunLayout, manifest: WeightsManifest, findings: Findings) -> None:
    directory = layout.weights_version(manifest.version)
    named = {layout.weights_manifest(manifest.version), layout.weights_retirement(manifest.version)}
    named |= {directory / ref.path for ref in manifest.files}
    for path in listed(directory):
        if path not in named and not path.name.startswith(TEMPORARY_PREFIX):
            findings.note("leftover", path, "the manifest does not name it", move=path)
