"""Routed experts of a response that several incarnations drew: each entry is of the one that drew the next token."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from milesbatch.engines.protocol import Completion, GenerationRequest, SamplingParams
from milesbatch.environments.prompts import Prompt
from milesbatch.ids import VersionSpan
from milesbatch.records import digest_bytes
from milesbatch.rollout.continuing import Conditions, joined, kept, resumed, why_not
from milesbatch.rollout.episodes import Episode
from milesbatch.trajectories.experts import RoutedExperts
from milesbatch.trajectories.inflight_schema import BegunSample

WEIGHTS = {4: digest_bytes(b"weights 4"), 5: digest_bytes(b"weights 5")}
NONE = b"\xff\xff"
PROMPT = (1, 2, 3)


def entries(*numbers: int | None) -> RoutedExperts:
    """One for each token; None: not known."""
    parts = [NONE if number is None else bytes([number, 0]) for number in numbers]
    return RoutedExperts.from_entries(parts)


def completion(tokens: tuple[int, ...], version: int, reason: Any, experts: RoutedExperts | None) -> Completion:
    spans = (VersionSpan(0, version),) if tokens else ()
    return Completion(tokens, (-0.5,) * len(tokens), reason, spans, experts)


def episode() -> Episode:
    return Episode(8, 0, Prompt("p", (), "", {}), GenerationRequest(PROMPT, SamplingParams(10), 0))


def begun(experts: RoutedExperts | None) -> BegunSample:
    """Two tokens, 7 and 8, as the first incarnation saves them."""
    first = completion((7, 8), 4, "abort", experts)
    saved = kept(episode(), first, WEIGHTS, datetime(2026, 3, 1, tzinfo=UTC), 1)
    assert saved is not None
    saved.validate()
    return saved


FIRST = entries(1, 2, 3, 4, None)


@pytest.mark.parametrize(
    ("experts", "tokens", "later", "whole"),
    [
        (FIRST, (9, 6), entries(None, None, None, None, 5, 6, None), entries(1, 2, 3, 4, 5, 6, None)),
        (None, (9, 6), entries(None, None, None, None, 5, 6, None), entries(None, None, None, None, 5, 6, None)),
        (FIRST, (), entries(*[None] * 5), FIRST),
        (FIRST, (), None, FIRST),
        (FIRST, (9, 6), None, None),
        (None, (9, 6), None, None),
    ],
    ids=["both", "the later", "nothing drawn", "finished before", "the earlier", "neither"],
)
def test_parts_become_one(
    experts: RoutedExperts | None, tokens: tuple[int, ...], later: RoutedExperts | None, whole: RoutedExperts | None
) -> None:
    sample = begun(experts)
    assert sample.routed_experts == experts
    found = joined(sample, completion(tokens, 5, "abort", later))
    assert (found.tokens, found.experts) == ((7, 8, *tokens), whole)
    saved = kept(resumed(episode(), sample), found, WEIGHTS, datetime(2026, 3, 1, tzinfo=UTC), 2)
    assert saved is not None and saved.routed_experts == whole
    saved.validate()


def test_experts_of_other_tokens_are_not_gone_on_with() -> None:
    conditions = Conditions(2, 5, 3, 5, WEIGHTS.get)
    assert why_not(begun(FIRST), episode(), conditions) is None
    assert why_not(begun(entries(1, 2, 3, None)), episode(), conditions) == "its experts are of other tokens"
