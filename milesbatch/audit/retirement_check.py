"""Retired policy versions: whose payload was deleted, and whether the rules allowed it.

Owns the question "is payload of this version wanted?"; the rules themselves are in ``decisions/retention.py``. Invariant:
missing payload is excused only by a record of its version; one that does not agree with itself, with the recipe, or with the
full copies that are kept is a violation. The pages behind it are ``docs/protocol.md`` and ``docs/format-weights.md``.
"""

from __future__ import annotations

from collections.abc import Collection

from milesbatch.audit.findings import Findings, ranges
from milesbatch.audit.rules import Rules
from milesbatch.audit.seals_check import Lives
from milesbatch.records import Retirement, WeightsManifest
from milesbatch.store.layout import RunLayout


class Retirements:
    """The retirements of a run. A run may retire more while it is looked at: each question looks again."""

    def __init__(self, layout: RunLayout, lives: Lives, rules: Rules | None, findings: Findings) -> None:
        self._layout, self._lives, self._rules, self._findings = layout, lives, rules, findings
        self._judged: dict[int, bool] = {}
        self.base = 0
        """Versions below this one are retired or may be; the largest base of a record that agrees with the rules."""

    def cover(self, version: int) -> bool:
        """Was the payload of ``version`` retired? True for a damaged record, too: that is a violation of its own."""
        if version not in self._judged:
            path = self._layout.weights_retirement(version)
            record = self._findings.read_record(Retirement, path, move=path)
            if record is not None:
                self._judged[version] = self._judge(version, record)
            elif self._findings.has_trouble(path):
                self._judged[version] = False
        return version in self._judged

    def note_left(self, manifest: WeightsManifest) -> None:
        """Payload that a killed process has left behind its retirement."""
        for ref in manifest.files:
            path = self._layout.weights_version(manifest.version) / ref.path
            if path.exists():
                self._findings.note("leftover", path, "its version was retired; the next retirement deletes it")

    def check_kept(self, kept: Collection[WeightsManifest], last_version: int, last_step: int) -> None:
        """After all versions were looked at: is there a full copy from which everything that must stay can be rebuilt?"""
        newest = max((version for version, is_allowed in self._judged.items() if is_allowed), default=-1)
        full = [manifest.version for manifest in kept if manifest.keyframe is not None]
        if newest < 0 or any(newest < version <= self.base for version in full):
            return
        path = self._layout.weights_retirement(newest)
        detail = f"no full copy is kept among versions {ranges([newest + 1, self.base])}, on which its deletion relied"
        if newest == last_version and last_version < last_step:
            self._findings.note("awaits-replay", path, detail)
        else:
            self._findings.violate("retired", path, detail)

    def _judge(self, version: int, record: Retirement) -> bool:
        path = self._layout.weights_retirement(version)
        if record.version != version:
            self._findings.violate(
                "mismatch", path, f"it is the retirement of policy version {record.version}", move=path
            )
            return False
        self._lives.check_writer(record.incarnation, path, self._findings)
        limit = record.checkpoint - 1 - record.staleness
        if not version < record.base <= record.needed <= limit:
            detail = (
                f"version {version} was deleted for the full copy of version {record.base}, with version {record.needed}"
                f" needed and {limit} the newest that checkpoint {record.checkpoint} lets go"
            )
            self._findings.violate("retired", path, detail)
            return False
        if self._rules is not None and record.staleness != self._rules.batching.staleness:
            detail = f"it reckons with staleness {record.staleness}, the recipe says {self._rules.batching.staleness}"
            self._findings.violate("retired", path, detail)
            return False
        self.base = max(self.base, record.base)
        return True
