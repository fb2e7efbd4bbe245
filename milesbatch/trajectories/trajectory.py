"""One sample as it is recorded: a frozen value that checks itself.

Owns: what a trajectory holds and when it is consistent. Never: bytes, files, tensors, fates (those live in batch
records) or advantages (those belong to training). Invariant: a trajectory that passed :meth:`Trajectory.validate` can
be written, read again and trained on without another check. The page behind it is the schema in
``docs/format-trajectories.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from milesbatch.ids import VersionSpan, check_digest, check_worker_name

_INT32 = 2**31
_INT64 = 2**63
_FINISH_REASON = re.compile(r"^[a-z][a-z_]*$")
MOST_LOGPROB = 1e-3
"""A float32 log-softmax of a certain token may come out a little above 0."""
LEAST_LOGPROB = -200.0
"""Nothing below exp(-104) is a float32, and a probability that is none is never drawn; the rest is for engines that draw by
other numbers than they tell."""


def is_logprob(value: float) -> bool:
    """Can it be the logarithm of the probability of a token that was drawn?"""
    return LEAST_LOGPROB <= value <= MOST_LOGPROB  # NaN is not


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation; ``tool_calls`` is JSON text, null when the message calls no tool."""

    role: str
    content: str
    tool_calls: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The recorded sample of a prompt group.

    Shapes: ``tokens``, ``loss_mask`` and ``logprobs`` have equal length P + R. The first P = ``prompt_tokens`` are the
    prompt; R = ``response_tokens`` begins with the first token that the policy wrote and may hold tokens that it did
    not (tool results), where the mask is false.
    """

    group_id: int
    sample_index: int
    prompt_id: str
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy wrote the token."""
    logprobs: tuple[float, ...]
    """Natural logarithms, stored as float32; 0 where the mask is false."""
    versions: tuple[VersionSpan, ...]
    """Runs of equal policy version; ``start`` indexes ``tokens``, the first is the first token the policy wrote."""
    weights_digest: str
    """Digest of the newest policy version used; empty only when the policy wrote nothing."""
    reward: float
    rewards: Mapping[str, float]
    """Named parts of the reward."""
    finish_reason: str
    turns: int
    seed: int
    worker: str
    incarnation: int
    started: datetime
    ended: datetime
    prompt_tokens: int
    response_tokens: int
    error: str | None = None
    """What made the episode fail; null when it did not."""
    routed_experts: tuple[bytes, ...] | None = None
    """For each token the experts that it went through, as bytes of one fixed width; null for dense models."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """What the environment adds, JSON values only."""

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(self.loss_mask)

    def validate(self) -> None:
        """Check that the parts agree.

        Raises:
            ValueError: they do not; names group, sample, field and the value found.
        """
        try:
            _check_identity(self)
            _check_tokens(self)
            _check_versions(self)
            _check_outcome(self)
        except ValueError as error:
            raise ValueError(f"trajectory of group {self.group_id}, sample {self.sample_index}: {error}") from error


def _check_identity(trajectory: Trajectory) -> None:
    _check_range("group_id", trajectory.group_id, 0, _INT64)
    _check_range("sample_index", trajectory.sample_index, 0, _INT32)
    _check_range("seed", trajectory.seed, -_INT64, _INT64)
    _check_range("incarnation", trajectory.incarnation, 0, _INT32)
    _check_range("turns", trajectory.turns, 0, _INT32)
    check_worker_name(trajectory.worker)
    for name, moment in (("started", trajectory.started), ("ended", trajectory.ended)):
        # Their order is not checked: a clock may be set back, and an episode is not worth less for it.
        if moment.tzinfo is None:
            raise ValueError(f"{name} has no time zone: {moment.isoformat()}")


def _check_tokens(trajectory: Trajectory) -> None:
    length, mask = len(trajectory.tokens), trajectory.loss_mask
    for name, values in (("loss_mask", mask), ("logprobs", trajectory.logprobs)):
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries for {length} tokens")
    if trajectory.prompt_tokens < 0 or trajectory.prompt_tokens + trajectory.response_tokens != length:
        counts = f"{trajectory.prompt_tokens} + {trajectory.response_tokens}"
        raise ValueError(f"prompt_tokens + response_tokens is {counts}, but there are {length} tokens")
    first = next((i for i, wrote in enumerate(mask) if wrote), length)
    if first != trajectory.prompt_tokens:
        raise ValueError(f"loss_mask is first true at {first}, but prompt_tokens is {trajectory.prompt_tokens}")
    for i, (token, wrote, logprob) in enumerate(zip(trajectory.tokens, mask, trajectory.logprobs, strict=True)):
        if not 0 <= token < _INT32:
            raise ValueError(f"tokens[{i}] is {token}, which is not a token id")
        if not is_logprob(logprob):
            raise ValueError(f"logprobs[{i}] is {logprob}, which is not the logarithm of a probability above 0")
        if not wrote and logprob != 0:
            raise ValueError(f"logprobs[{i}] is {logprob} where loss_mask is false; it must be 0 there")
    if trajectory.routed_experts is not None:
        _check_experts(trajectory.routed_experts, length)


def _check_experts(experts: Sequence[bytes], length: int) -> None:
    if len(experts) != length:
        raise ValueError(f"routed_experts has {len(experts)} entries for {length} tokens")
    widths = {len(entry) for entry in experts}
    if len(widths) > 1 or 0 in widths:
        raise ValueError(f"routed_experts has entries of {sorted(widths)} bytes; all must have the same positive width")


def _check_versions(trajectory: Trajectory) -> None:
    spans, mask = trajectory.versions, trajectory.loss_mask
    if not spans:
        if trajectory.response_tokens:
            raise ValueError("versions is empty, but the policy wrote tokens")
        if trajectory.weights_digest:
            check_digest(trajectory.weights_digest)
        return
    check_digest(trajectory.weights_digest)
    if spans[0].start != trajectory.prompt_tokens:
        raise ValueError(f"versions begin at token {spans[0].start}, but prompt_tokens is {trajectory.prompt_tokens}")
    for span in spans:
        _check_range("versions.version", span.version, 0, _INT64)
        if not span.start < len(mask) or not mask[span.start]:
            raise ValueError(f"versions has a span from token {span.start}, which the policy did not write")
    for before, after in pairwise(spans):
        if before.start >= after.start or before.version >= after.version:
            raise ValueError(f"versions do not ascend: {before} is followed by {after}")


def _check_outcome(trajectory: Trajectory) -> None:
    for name, value in (("reward", trajectory.reward), *_parts(trajectory.rewards)):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; a reward must be a finite number")
    if not _FINISH_REASON.match(trajectory.finish_reason):
        raise ValueError(f"finish_reason is {trajectory.finish_reason!r}, which is not a lower-case word")
    if trajectory.error is not None and not trajectory.error:
        raise ValueError("error is empty; it is null when nothing failed, and says what failed otherwise")
    env_text(trajectory.env)


def _parts(rewards: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(f"rewards[{name!r}]", value) for name, value in rewards.items()]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}, outside {low} .. {high - 1}")


def env_text(env: Mapping[str, Any]) -> str:
    """The one JSON text of what the environment adds: sorted keys, no white space.

    Raises:
        ValueError: it holds something that JSON does not.
    """
    try:
        return json.dumps(dict(env), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"env is not made of JSON values: {error}") from error
