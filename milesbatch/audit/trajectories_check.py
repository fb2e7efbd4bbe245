"""Trajectories: every trained group is there, whole, and made by versions that existed and were allowed.

Owns the walk over the files, one at a time; never the fates (batch records give them). Invariant: a file that no record that
counts names, and that a later seal does not list, is an orphan and breaks no promise. The pages behind it are
``docs/format-trajectories.md`` and ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.audit.columns import FileFacts, read_facts
from milesbatch.audit.findings import Findings, ranges
from milesbatch.audit.records_check import History, Use
from milesbatch.audit.rules import Identity
from milesbatch.audit.seals_check import Lives
from milesbatch.audit.weights_check import Versions
from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import GroupRef, digest_bytes
from milesbatch.store.durable import TEMPORARY_PREFIX, read_optional
from milesbatch.store.entries import listed
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.vocabulary import vocabulary_of
from milesbatch.trajectories.writer import content_tag

_READERS = 2
"""Files that are read ahead of the one that is judged, which hides the latency of a shared filesystem; each is held in
memory."""


@dataclass(slots=True)
class Experience:
    """What the trajectory files hold, summed up."""

    trajectories: int = 0
    pending: set[int] = field(default_factory=set)
    """Groups in files that count, without a fate."""
    missing: set[int] = field(default_factory=set)
    """Groups that a record or a seal names, whose file is not there or is damaged."""
    again: set[int] = field(default_factory=set)
    """Groups that more than one file holds: work that was done more than once."""


@dataclass(frozen=True, slots=True)
class _Looked:
    """A file that was read; ``facts`` is None when its content is not what its name says."""

    size: int
    digest: str
    facts: FileFacts | None


@dataclass(slots=True)
class _Check:
    layout: RunLayout
    identity: Identity
    lives: Lives
    history: History
    versions: Versions
    findings: Findings
    vocabulary: int | None
    """How many token ids the run's model has."""
    found: Experience = field(default_factory=Experience)
    seen: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    """Trained groups whose file is not there -> digest of their content."""
    made_again: set[int] = field(default_factory=set)
    """Those of them that another file holds with the same content."""

    # -- one file ---------------------------------------------------------------------------------------------------

    def look(self, path: Path, name: TrajectoryName) -> _Looked | StorageError | None:
        """Read and digest a file (in another thread); None when it is gone."""
        try:
            data = read_optional(path)
        except StorageError as error:
            return error
        if data is None:
            return None
        digest = digest_bytes(data)
        if content_tag(digest) != name.tag:
            return _Looked(len(data), digest, None)
        rules = self.identity.rules
        facts = read_facts(path, data, digest, name, None if rules is None else rules.seed, self.vocabulary)
        return _Looked(len(data), digest, facts)

    def judge(self, path: Path, name: TrajectoryName, looked: _Looked | StorageError) -> None:
        uses = self.history.uses.get(path.name, [])
        groups = range(name.first_group, name.last_group + 1)
        if isinstance(looked, StorageError):
            self.findings.violate("unreadable", path, looked.what)
            return
        self.findings.count(looked.size)
        counts = bool(uses) or self._is_ready(name)
        if looked.facts is None:
            detail = f"{path} is damaged: its name says {name.tag}, its content is {looked.digest}"
            if counts:
                self.findings.violate("damaged", path, detail, move=path)
                self.found.missing.update(use.group.group_id for use in uses)
                self.found.missing.update(group for group in groups if not self.history.is_decided(group))
            else:
                self.findings.note("orphan", path, f"it does not count, and {detail}", move=path)
            return
        facts = looked.facts
        self.found.again.update(group for group in facts.groups if group in self.seen)
        self.seen.update(facts.groups)
        if not counts and self._holds_lost_groups(path, facts):
            detail = "it holds groups whose file was lost, generated again with the content that was trained on"
            self.findings.note("made-again", path, detail)
            return
        if not counts:
            self.findings.note("orphan", path, self._why_not(name), move=path)
            return
        self.lives.check_writer(name.incarnation, path, self.findings)
        self._check_facts(path, name, facts)
        for use in uses:
            self._check_use(path, name, facts, use)
        open_groups = [group for group in facts.groups if not self.history.is_decided(group)]
        self.found.pending.update(open_groups)
        self.found.trajectories += facts.rows

    def _is_ready(self, name: TrajectoryName) -> bool:
        """Does an unconsumed file wait for training? The first one of its groups does, if no later seal leaves it out."""
        groups = range(name.first_group, name.last_group + 1)
        has_fate = name.first_group in self.history.fates
        return self.lives.accept_file(name) and not has_fate and self.found.pending.isdisjoint(groups)

    def _holds_lost_groups(self, path: Path, facts: FileFacts) -> bool:
        """Does a file prove groups of a lost one, by the content that the batch record states?"""
        if facts.problems or self.lost.keys().isdisjoint(facts.groups):
            return False
        try:
            same = {ref.group_id for ref in group_refs(path) if self.lost.get(ref.group_id) == ref.content}
        except CorruptArtefactError:  # whole, but no writer of ours commits such rows
            return False
        self.made_again |= same
        self.found.again |= same
        return bool(same)

    def _why_not(self, name: TrajectoryName) -> str:
        if not self.lives.accept_file(name):
            return "no batch record names it, and a later incarnation did not accept it; it does not count"
        return "another file holds the same groups; it does not count"

    # -- inside a file that counts ----------------------------------------------------------------------------------

    def _check_facts(self, path: Path, name: TrajectoryName, facts: FileFacts) -> None:
        for problem in facts.problems:
            self.findings.violate("mismatch", path, problem)
        if facts.metadata is not None:
            self._check_metadata(path, facts)
        rules = self.identity.rules
        sizes = {group.samples for group in facts.groups.values()}
        if rules is not None and not sizes <= {rules.samples_per_group}:
            detail = f"it has groups of {sorted(sizes)} samples; the recipe says {rules.samples_per_group}"
            self.findings.violate("mismatch", path, detail)
        for version in facts.versions:
            if self.versions.digest(version) is None:
                self._missing_version(path, name, version)
        for version, stated in sorted(facts.weights):
            digest = self.versions.digest(version)
            if digest is not None and digest != stated:
                detail = f"made with weights {stated}, but policy version {version} has {digest}"
                self.findings.violate("version", path, detail)
        if rules is not None and rules.batching.bitwise:
            self._check_bitwise(path, facts)

    def _check_metadata(self, path: Path, facts: FileFacts) -> None:
        assert facts.metadata is not None
        wanted = (
            ("run", facts.metadata.run_id, self.identity.run_id),
            ("tokenizer", facts.metadata.tokenizer_digest, self.identity.fingerprints.get("tokenizer")),
            ("chat template", facts.metadata.chat_template_digest, self.identity.fingerprints.get("chat_template")),
        )
        for what, found, expected in wanted:
            if expected is not None and found != expected:
                self.findings.violate("mismatch", path, f"it is of {what} {found}, the run has {expected}")

    def _missing_version(self, path: Path, name: TrajectoryName, version: int) -> None:
        manifest = self.layout.weights_manifest(version)
        if self.findings.has_trouble(manifest):
            return
        replayable = self.versions.required < version <= self.history.last_step
        if replayable and name.incarnation < self.lives.newest:
            self.findings.note("awaits-replay", path, self.versions.describe_missing(version))
        else:
            detail = f"made with policy version {version}: {self.versions.describe_missing(version)}"
            self.findings.violate("version", path, detail)

    def _check_bitwise(self, path: Path, facts: FileFacts) -> None:
        assert self.identity.rules is not None
        for group_id, group in facts.groups.items():
            wanted = self.identity.rules.batching.version_for(group_id)
            if group.version_min != -1 and {group.version_min, group.version_max} != {wanted}:
                found = ranges([group.version_min, group.version_max])
                detail = f"group {group_id} was made by policy version {found}; in bitwise mode it must be {wanted}"
                self.findings.violate("stale" if group.version_min < wanted else "version", path, detail)

    # -- what a batch record says of it -----------------------------------------------------------------------------

    def _check_use(self, path: Path, name: TrajectoryName, facts: FileFacts, use: Use) -> None:
        record, ref = self.layout.batch(use.step), use.group
        if ref.digest != facts.digest:
            detail = f"it names {path.name} with digest {ref.digest}, the file has {facts.digest}"
            self.findings.violate("mismatch", record, detail)
        if name.incarnation > use.incarnation or not self.lives.accept_file(name, until=use.incarnation):
            detail = f"incarnation {use.incarnation} uses {path.name}, which it had not sealed"
            self.findings.violate("fenced", record, detail)
        group = facts.groups.get(ref.group_id)
        if group is None:
            self.findings.violate("mismatch", record, f"group {ref.group_id} is not in {path.name}")
            self.found.missing.add(ref.group_id)
        elif isinstance(ref, GroupRef):
            stated = (ref.samples, ref.version_min, ref.version_max)
            held = (group.samples, group.version_min, group.version_max)
            if stated != held:
                detail = f"group {ref.group_id}: samples and versions are {stated} in the record, {held} in {path.name}"
                self.findings.violate("mismatch", record, detail)
            self._check_lag(path, use.step, ref.group_id, group.version_min, group.version_max)

    def _check_lag(self, path: Path, step: int, group_id: int, oldest: int, newest: int) -> None:
        rules = self.identity.rules
        if newest > step - 1:
            detail = (
                f"group {group_id} was made by policy version {newest} and trained at step {step}, which begins with"
            )
            self.findings.violate("version", path, f"{detail} version {step - 1}")
        if rules is None or rules.batching.bitwise or oldest == -1:
            return
        if oldest < step - 1 - rules.batching.staleness:
            detail = f"group {group_id} was trained at step {step} with tokens of policy version {oldest}: staleness"
            detail = f"{detail} {step - 1 - oldest}, allowed {rules.batching.staleness}"
            self.findings.violate("stale", path, detail)


def check_trajectories(
    layout: RunLayout, identity: Identity, lives: Lives, history: History, versions: Versions, findings: Findings
) -> Experience:
    """Read every trajectory file once, in the order of groups."""
    check = _Check(layout, identity, lives, history, versions, findings, vocabulary_of(layout.model))
    present: set[str] = set()
    names = _names(layout, findings)
    there = {path.name for path, _ in names}
    for use in (use for file_name, uses in history.uses.items() if file_name not in there for use in uses):
        if isinstance(use.group, GroupRef):
            check.lost[use.group.group_id] = use.group.content
    for path, name, looked in _read_ahead(check, names):
        if looked is not None:
            present.add(path.name)
            check.judge(path, name, looked)
    _check_absent(check, present)
    return check.found


def _names(layout: RunLayout, findings: Findings) -> list[tuple[Path, TrajectoryName]]:
    """Trajectory files by their groups, older incarnations first: the first one of a group is the one that counts."""
    found = []
    for path in listed(layout.trajectories):
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            found.append((path, TrajectoryName.parse(path.name)))
        except ValueError as error:
            findings.note("stranger", path, str(error), move=path)
    return sorted(found, key=lambda item: (item[1].first_group, item[1].incarnation, item[0].name))


def _read_ahead(
    check: _Check, names: list[tuple[Path, TrajectoryName]]
) -> Iterator[tuple[Path, TrajectoryName, _Looked | StorageError | None]]:
    """Read, digest and parse in threads; judge here, in order."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: list[tuple[Path, TrajectoryName, Future[_Looked | StorageError | None]]] = []
        for path, name in names:
            waiting.append((path, name, pool.submit(check.look, path, name)))
            if len(waiting) > _READERS:
                first, its_name, future = waiting.pop(0)
                yield first, its_name, future.result()
        for first, its_name, future in waiting:
            yield first, its_name, future.result()


def _check_absent(check: _Check, present: set[str]) -> None:
    for file_name, uses in sorted(check.history.uses.items()):
        path = check.layout.trajectory(file_name)
        if file_name not in present and not path.exists():
            steps = ranges(sorted({use.step for use in uses}))
            if check.made_again.issuperset(use.group.group_id for use in uses):
                detail = f"{path} of step {steps} is missing; its groups were generated again with the same content"
                check.findings.note("made-again", path, detail)
                continue
            check.findings.violate("missing", path, f"{path} is missing; the batch record of step {steps} names it")
            check.found.missing.update(use.group.group_id for use in uses)
    for name in check.lives.sealed_files():
        path = check.layout.trajectory(name)
        if path.name not in present and path.name not in check.history.uses and not path.exists():
            detail = f"{path} is missing, but incarnation {check.lives.newest} sealed it"
            check.findings.violate("missing", path, detail)
            check.found.missing.update(range(name.first_group, name.last_group + 1))
