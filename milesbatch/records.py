"""The committed JSON records of a run: frozen values, one canonical text form, self-checking. No I/O, no clock.

Every record carries ``record_digest`` over its own canonical text, and is only accepted when its bytes are exactly the
canonical text: a flipped bit anywhere in the file, white space included, is found when it is read. The page behind this
module is ``docs/format.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from milesbatch import FORMAT_VERSION
from milesbatch.errors import CorruptArtefactError, FormatVersionError


def digest_bytes(data: bytes | memoryview) -> str:
    """Digest of a byte string: ``xxh128:<hex>`` (XXH3, 128 bits; detects damage, is no protection against an attacker)."""
    return "xxh128:" + xxhash.xxh3_128_hexdigest(data)


def canonical_json(value: Any) -> bytes:
    """The one text form of a JSON value: sorted keys, one-space indent, UTF-8, newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


class Value(BaseModel):
    """A frozen value inside a record; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Record(Value):
    """A record that is a file of its own. Subclasses set ``kind`` and may bump the minor format version by adding keys."""

    kind: ClassVar[str]

    def to_bytes(self) -> bytes:
        """The bytes to commit: canonical JSON with ``kind``, ``format`` and ``record_digest``."""
        body: dict[str, Any] = {"kind": self.kind, "format": list(FORMAT_VERSION), **self.model_dump(mode="json")}
        body["record_digest"] = digest_bytes(canonical_json(body))
        return canonical_json(body)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Self:
        """Parse and verify a committed record.

        Raises:
            CorruptArtefactError: the bytes are not what ``to_bytes`` wrote; names ``path`` and both digests.
            FormatVersionError: written by a newer major version, or by a newer minor one with keys that are not known.
        """
        mend = f"run `milesbatch audit` on the run; the record {path} cannot be trusted"
        # Only the outermost brace is at the beginning of its line. Cut short: perhaps not all of it is visible yet.
        unseen = None if data.endswith(b"\n}\n") else Path(path)
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("it is not a JSON object")
            stated = body.pop("record_digest")
            canonical = canonical_json(body)
        except (ValueError, KeyError, RecursionError) as error:
            what = (
                f"{path}: not a readable {cls.kind} record ({error}); its {len(data)} bytes have {digest_bytes(data)}"
            )
            raise CorruptArtefactError(what, mend=mend, unseen=unseen) from error
        found = digest_bytes(canonical)
        if stated != found:
            what = f"{path}: record digest is {stated}, its content has {found}"
            raise CorruptArtefactError(what, mend=mend, unseen=unseen)
        written = canonical_json({**body, "record_digest": stated})
        if written != data:
            what = (
                f"{path}: its {len(data)} bytes have {digest_bytes(data)}, as written they had {digest_bytes(written)}"
            )
            raise CorruptArtefactError(what, mend=mend, unseen=unseen)
        version = _format_version(body.pop("format", None))
        if version is None:
            raise CorruptArtefactError(f"{path}: says no format version", mend=mend)
        if version[0] > FORMAT_VERSION[0]:
            raise _newer(path, str(version[0]), str(FORMAT_VERSION[0]))
        if body.pop("kind", None) != cls.kind:
            raise CorruptArtefactError(f"{path}: holds another kind of record than {cls.kind}", mend=mend)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            if version > FORMAT_VERSION:  # whole, but with keys that this version does not know: not damage
                raise _newer(path, "{}.{}".format(*version), "{}.{}".format(*FORMAT_VERSION)) from error
            fields = ", ".join(".".join(map(str, problem["loc"])) or "the whole" for problem in error.errors()[:3])
            # Its digest is right, so it is what its writer meant: never treated as damage, never moved away.
            raise FormatVersionError(
                f"{path} is whole, but this version does not understand it ({fields})",
                mend="continue this run with the version of milesbatch that wrote it",
            ) from error


def _format_version(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value):
        return value[0], value[1]
    return None


def _newer(path: str, found: str, known: str) -> FormatVersionError:
    return FormatVersionError(
        f"{path}: format {found} is newer than the {known} that this version reads",
        mend="read this run with a newer milesbatch",
    )


class FileRef(Value):
    """A payload file of an artefact: ``path`` is relative to the directory of the manifest that names it."""

    path: str
    bytes: int
    digest: str


FORKED = 0
"""The incarnation that manifests of a fork's first state name: before all of its own, so that every seal covers them."""


class ForkedFrom(Value):
    """Which state of which run a fork began with. Steps, policy versions and group ids go on counting from there."""

    run_id: str
    path: str
    """The parent's directory, absolute and without symbolic links; it need not exist any more."""
    step: int
    policy_version: int
    """Always ``step``."""
    weights_digest: str | None
    """Of that version as the parent published it; null when it had not published any (``step`` is 0 then)."""
    checkpoint_digest: str | None
    """Of the parent's checkpoint manifest, the whole file; null when ``step`` is 0: the starting model has no checkpoint."""
    first_version: int
    """Oldest policy version that was taken over: groups of the first steps may be made by versions below ``step``."""
    first_group: int
    """Smallest group id that had no fate."""
    decided: tuple[int, ...] = ()
    """Larger group ids that had one, ascending."""


class ForkRecord(Record):
    """``fork.json``: a state of a parent lies here, whole, and a run can be made of it. Committed with all of ``files``."""

    kind: ClassVar[str] = "fork"
    forked_from: ForkedFrom
    files: tuple[FileRef, ...]
    """What was taken over and written, relative to the run directory."""
    created_at: str


class RunRecord(Record):
    """``run.json``: what this run is. Written once; its commit is the moment at which the run exists."""

    kind: ClassVar[str] = "run"
    run_id: str
    name: str
    recipe_digest: str
    created_at: str
    fingerprints: dict[str, str]
    """Digests of what the run depends on: ``model``, ``tokenizer``, ``chat_template``, ``data``, ``reward``."""
    files: tuple[FileRef, ...] = ()
    """Files under ``model/`` and ``recipe.yaml``, relative to the run directory; of a fork also ``fork.json`` and those that
    it names under ``parent/``."""
    forked_from: ForkedFrom | None = None
    """Of a fork: the state that it began with."""


class Seal(Value):
    """What a new incarnation accepts of all earlier ones. What is not covered here, and appears later, does not count."""

    last_batch: int
    """Newest accepted batch record; 0 when there is none. The chain 1..last_batch is unbroken."""
    last_version: int
    """Newest accepted policy version; -1 when not even version 0 is published."""
    checkpoints: tuple[int, ...]
    """Steps of accepted checkpoints, ascending."""
    trajectories: tuple[str, ...]
    """Names of accepted trajectory files that no accepted batch record has consumed yet, sorted."""


class IncarnationRecord(Record):
    """``incarnations/000003.json``: one life of the controller. Its exclusive creation is the take-over."""

    kind: ClassVar[str] = "incarnation"
    incarnation: int
    host: str
    pid: int
    process_started: str
    """Start time of the process as the kernel counts it (boot id and ticks), so that a reused pid is not mistaken for it."""
    job_id: str
    restart_count: int
    cause: str
    """Why this incarnation began: ``first``, ``continued`` (earlier one ended by itself), or how the earlier one was lost."""
    started_at: str
    recipe_changes: dict[str, Any] = {}
    """Allowed changes to the frozen recipe that this incarnation runs with: dotted path -> value."""
    seal: Seal


class GroupRef(Value):
    """Where a prompt group's trajectories are and which policy versions made them."""

    group_id: int
    path: str
    """File name inside ``trajectories/``."""
    digest: str
    """Digest of the whole file."""
    content: str
    """Digest of what training takes from the group (tokens, masks, logprobs, rewards, versions), see
    ``trajectories/groups.py``: a group that is generated again in another file can be proven to be the same."""
    version_min: int
    version_max: int
    samples: int


class Rejection(Value):
    """A group that will never be trained on, and why."""

    group_id: int
    reason: Literal["stale", "failed", "zero_variance", "filtered"]
    path: str
    digest: str


class BatchRecord(Record):
    """``batches/000012.json``: what step 12 trains on. Committed before the step computes; never changed.

    A group's fate is in the one batch record that names it: ``trained(step)`` or ``rejected(reason, step)``.
    """

    kind: ClassVar[str] = "batch"
    step: int
    incarnation: int
    trained: tuple[GroupRef, ...]
    rejected: tuple[Rejection, ...]
    stream_position: int
    """Smallest group id above which (itself included) no group has a fate yet in batch records 1..step."""
    created_at: str


class TensorEntry(Value):
    """One tensor of a policy version: what the result must be after the artefact was applied."""

    name: str
    dtype: str
    """safetensors spelling: ``F32``, ``BF16``, ``F16``."""
    shape: tuple[int, ...]
    digest: str
    """Digest of the raw little-endian bytes of the whole tensor in this version."""
    encoding: Literal["raw", "same", "xor-zstd", "steps-zstd", "raw-zstd"]
    """How the delta holds it; ``raw`` when the version has no delta."""
    changed: int
    """Elements that differ from the parent; without a parent, the number of elements."""
    file: str | None
    """Payload file that holds it in that encoding; null when ``encoding`` is ``same``."""


class WeightsManifest(Record):
    """``weights/000013/manifest.json``: policy version 13, written after its payload. Its creation is the commit.

    A version can hold a delta, a keyframe, or both: with both, a follower that is up to date reads only the delta, and
    damage to one of the two leaves the other way.
    """

    kind: ClassVar[str] = "weights"
    version: int
    incarnation: int
    artefact: Literal["keyframe", "delta"]
    """``keyframe`` when a full copy is among the files."""
    parent: int | None
    """Version that the delta applies to (always ``version - 1``); null when there is no delta."""
    keyframe: str | None
    """Payload file of the full copy (a plain safetensors file of stored tensors); null when there is none."""
    keyframe_shards: tuple[str, ...] = ()
    """Further files of the full copy, where several ranks wrote it: each holds other tensors, whole ones."""
    weights_digest: str
    """Digest over name, dtype, shape and digest of every tensor, in name order (see ``weights/digest.py``)."""
    tensors: tuple[TensorEntry, ...]
    tied: dict[str, str]
    """Names that share storage with another (alias -> stored name); aliases are not stored."""
    files: tuple[FileRef, ...]
    created_at: str

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names = {ref.path for ref in self.files}
        if any("/" in name or name in ("", ".", "..") for name in names):
            raise ValueError(f"payload files must lie beside the manifest, found {sorted(names)}")
        if (self.keyframe is not None) != (self.artefact == "keyframe"):
            raise ValueError(f"a {self.artefact} with keyframe file {self.keyframe}")
        if self.keyframe is None and self.keyframe_shards:
            raise ValueError(f"shards of a keyframe, and no keyframe: {', '.join(self.keyframe_shards)}")
        if self.parent not in (None, self.version - 1) or (self.parent is None and self.keyframe is None):
            raise ValueError(f"version {self.version} cannot be built from parent {self.parent}")
        full = {self.keyframe, *self.keyframe_shards}
        if not full | {entry.file for entry in self.tensors} <= {None, *names}:
            raise ValueError("a tensor lies in a file that is not listed")
        for entry in self.tensors:
            if (entry.file is None) != (entry.encoding == "same") or any(size < 0 for size in entry.shape):
                raise ValueError(f"tensor {entry.name}: encoding {entry.encoding} in {entry.file}, shape {entry.shape}")
            if self.parent is None and (entry.encoding != "raw" or entry.file not in full):
                raise ValueError(f"tensor {entry.name}: {entry.encoding} without a parent")
        return self


class Retirement(Record):
    """``weights/000007/retired.json``: the payload of policy version 7 is, or is being, deleted; its manifest stays.

    It repeats what the decision was made on (``decisions/retention.py``), so that an audit can judge it.
    """

    kind: ClassVar[str] = "retirement"
    version: int
    incarnation: int
    base: int
    """A later version with a whole full copy: this and every later version can be rebuilt without the retired ones."""
    needed: int
    """Smallest version that anything could still need: never below ``base``."""
    checkpoint: int
    """Oldest of the newest ``checkpoint.keep`` checkpoints; ``needed`` is at most ``checkpoint - 1 - staleness``."""
    staleness: int
    created_at: str


class Hold(Record):
    """``holds/NAME.json``: a reader outside of the run's own processes needs ``version`` and later ones. A hint: it is
    rewritten with a growing ``count`` while the reader lives, and counts for nothing when that stands still."""

    kind: ClassVar[str] = "hold"
    version: int
    reader: str
    """What reads, for people."""
    host: str
    pid: int
    count: int


class EvaluationSettings(Value):
    """What an evaluation asks, and how: two evaluations with equal settings can be compared."""

    prompts: str
    """Digest of all prompts with their reference answers, in order."""
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int
    reward: str
    """Digest of the reward function's name and source."""

    @property
    def digest(self) -> str:
        """Digest of the settings as canonical JSON."""
        return digest_bytes(canonical_json(self.model_dump(mode="json")))


class EvaluationFigures(Value):
    """What came out, over all samples; rewards and their parts over those whose episode did not fail, null without any."""

    samples: int
    failed: int
    reward_mean: float | None
    reward_std: float | None
    reward_best_mean: float | None
    """Mean over prompts of each one's best sample."""
    rewards: dict[str, float]
    """Mean of each named part of the reward."""
    length_mean: float
    """Response tokens."""
    length_max: int
    finish_reasons: dict[str, int]


class EvaluationRecord(Record):
    """``evaluations/000040/TAG.json``: what policy version 40 answered to held-out prompts. Its creation is the commit.

    It is a statement about weights, not about the run: it holds for whatever has the same weights digest.
    """

    kind: ClassVar[str] = "evaluation"
    version: int
    weights_digest: str
    name: str
    """``recipe`` for the prompts of the recipe; else the name of the prompt file."""
    settings: EvaluationSettings
    incarnation: int
    """Whose recipe it was made with."""
    host: str
    figures: EvaluationFigures
    files: tuple[FileRef, ...]
    """The trajectories, one Arrow file."""
    seconds: float
    """From the first request to the last answer."""
    started_at: str

    @property
    def tag(self) -> str:
        """The name of the record: what it is about, so that it is found without a listing."""
        return evaluation_tag(self.weights_digest, self.settings)


def evaluation_tag(weights_digest: str, settings: EvaluationSettings) -> str:
    """First 16 hexadecimal digits of a digest over weights and settings."""
    return digest_bytes(canonical_json([weights_digest, settings.digest])).partition(":")[2][:16]


class CheckpointManifest(Record):
    """``checkpoints/000010/manifest.json``: a consistent checkpoint after step 10. Its creation is the commit."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    incarnation: int
    policy_version: int
    weights_digest: str
    world_size: int
    files: tuple[FileRef, ...]
    stream_position: int
    fates_since: int
    """Batch records ``fates_since + 1 .. step`` are repeated in ``fates``, so that one lost record can be rebuilt."""
    fates: dict[str, str]
    """group id -> ``trained(k)`` or ``rejected(reason, k)`` for those records."""
    pending: tuple[GroupRef, ...]
    """Groups that were committed by workers and had no fate when the checkpoint was taken."""
    divergences: tuple[int, ...] = ()
    """Steps whose replay gave other weights than published (``on_divergence: adopt``), over the run's whole life."""
    created_at: str
