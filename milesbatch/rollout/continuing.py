"""Going on with a sample that an earlier incarnation began: whether it may be, and how its parts become one. Pure.

Owns: that judgement. Never: files or engines. Invariant: a sample goes on only when its prompt is the same, each of its
versions has the weights that are published under that number, and no token is too old for the first step that may train on
it; its draws then go on where they ended. The pages behind it are ``docs/protocol.md`` and ``docs/format-inflight.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from milesbatch.engines.protocol import Completion
from milesbatch.ids import VersionSpan
from milesbatch.rollout.episodes import Episode
from milesbatch.trajectories.experts import RoutedExperts
from milesbatch.trajectories.inflight_schema import BegunSample, Life, tokens_digest


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which samples may go on."""

    incarnation: int
    """The one that goes on."""
    step: int
    """The first step that may train on them."""
    oldest: int
    """Oldest policy version that may have drawn a token of that step."""
    newest: int
    """Policy version under which they go on."""
    digest_of: Callable[[int], str | None]
    """Weights digest of a published policy version; None when none of that number counts."""


def why_not(begun: BegunSample, episode: Episode, conditions: Conditions) -> str | None:
    """Why ``episode`` must be generated from the start, in words; None when ``begun`` may go on."""
    if begun.prompt_digest != tokens_digest(episode.request.prompt_tokens):
        return "the prompt has other tokens"
    length = len(episode.request.prompt_tokens) + len(begun.tokens)
    if begun.routed_experts is not None and len(begun.routed_experts) != length:
        return "its experts are of other tokens"
    room = episode.request.sampling.max_new_tokens - len(begun.tokens)
    if room < (1 if begun.finish_reason is None else 0):
        return "it is longer than a response may be"
    if begun.lives[-1].incarnation >= conditions.incarnation:
        return f"incarnation {begun.lives[-1].incarnation} has not ended"
    oldest, newest = begun.versions[0].version, begun.versions[-1].version
    if oldest < conditions.oldest:
        return f"policy version {oldest} is too old for step {conditions.step}"
    if newest > conditions.newest:
        return f"policy version {newest} is newer than {conditions.newest}, the one in use"
    for span, digest in zip(begun.versions, begun.weights, strict=True):
        published = conditions.digest_of(span.version)
        if published is None:
            return f"policy version {span.version} is not published any more"
        if published != digest:
            return f"policy version {span.version} was published again with other weights"
    return None


def resumed(episode: Episode, begun: BegunSample) -> Episode:
    """``episode``, going on after ``begun``."""
    return replace(episode, begun=begun, request=replace(episode.request, begun=begun.tokens))


def from_the_start(episode: Episode) -> Episode:
    """``episode`` without what was begun of it."""
    return replace(episode, begun=None, request=replace(episode.request, begun=()))


def joined(begun: BegunSample | None, later: Completion) -> Completion:
    """The whole response: what earlier incarnations drew, and what was drawn after it."""
    if begun is None:
        return later
    spans = [VersionSpan(span.start + len(begun.tokens), span.version) for span in later.versions]
    if spans and spans[0].version == begun.versions[-1].version:
        del spans[0]
    return Completion(
        begun.tokens + later.tokens,
        begun.logprobs + later.logprobs,
        later.finish_reason,
        (*begun.versions, *spans),
        _joined_experts(begun, later),
    )


def _joined_experts(begun: BegunSample, later: Completion) -> RoutedExperts | None:
    """Of the whole sequence, as far as somebody knows; None where nobody recorded any."""
    if begun.routed_experts is None or later.experts is None:
        return later.experts if later.experts is not None or later.tokens else begun.routed_experts
    if begun.routed_experts.width != later.experts.width:
        return later.experts
    start = len(begun.routed_experts) - 1  # when that one was fed, the first of the later tokens was drawn
    return begun.routed_experts.then(start, later.experts.last(len(later.experts) - start), len(later.experts))


def kept(
    episode: Episode, whole: Completion, weights: Mapping[int, str], started: datetime, incarnation: int
) -> BegunSample | None:
    """What is to be saved of a response (joined with what was begun before); None when it has no token yet.

    ``weights`` maps its policy versions to their digests.
    """
    if not whole.tokens:
        return None
    earlier = episode.begun
    lives = () if earlier is None else earlier.lives
    if earlier is None or len(whole.tokens) > len(earlier.tokens):
        lives = (*lives, Life(incarnation, len(whole.tokens)))
    return BegunSample(
        group_id=episode.group_id,
        sample_index=episode.sample_index,
        prompt_digest=tokens_digest(episode.request.prompt_tokens),
        tokens=whole.tokens,
        logprobs=whole.logprobs,
        versions=whole.versions,
        weights=tuple(weights[span.version] for span in whole.versions),
        finish_reason=None if whole.finish_reason == "abort" else whole.finish_reason,
        started=started if earlier is None else earlier.started,
        lives=lives,
        routed_experts=whole.experts,
    )
