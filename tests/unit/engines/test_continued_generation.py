"""A response that goes on after tokens that were drawn before is the one that it would have been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from engine_models import MAX_LENGTH, VOCAB, make_engine, make_model, reference_logprobs, request, results

from milesbatch.engines.decode_batch import DecodeBatch, Row
from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import Completion, GenerationRequest, VersionSpan


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    engine = make_engine(stop_text=spell)
    yield engine
    engine.close()


def begun(asked: GenerationRequest, whole: Completion, count: int) -> GenerationRequest:
    return replace(asked, begun=whole.tokens[:count])


def check_continued(whole: Completion, rest: Completion, count: int) -> None:
    assert whole.tokens[count:] == rest.tokens
    assert rest.logprobs == pytest.approx(whole.logprobs[count:], abs=1e-5)
    assert rest.finish_reason == whole.finish_reason
    assert rest.versions == (VersionSpan(0, 0),)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0], ids=["greedy", "cool", "sampled"])
@pytest.mark.parametrize("count", [1, 2, 17, 39])
def test_it_equals_what_nobody_interrupted(engine: EmbeddedEngine, temperature: float, count: int) -> None:
    """Token for token, sampled ones too: number i of the sample's seed decides token i, in whatever life."""
    asked = [request(3 + i, salt=i, seed=i, temperature=temperature, max_new_tokens=40) for i in range(5)]
    wholes = results(engine.submit(asked))
    rests = results(engine.submit([begun(one, whole, count) for one, whole in zip(asked, wholes, strict=True)]))
    for whole, rest in zip(wholes, rests, strict=True):
        check_continued(whole, rest, count)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_logprobs_are_those_of_a_full_forward(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model)
    asked = request(6, seed=4, max_new_tokens=30)
    (whole,) = results(engine.submit([asked]))
    (rest,) = results(engine.submit([begun(asked, whole, 11)]))
    engine.close()
    expected = reference_logprobs(model, asked, whole.tokens)[11:]
    assert torch.allclose(torch.tensor(rest.logprobs), expected, atol=1e-4, rtol=0)


def test_continued_and_fresh_rows_share_a_batch(engine: EmbeddedEngine) -> None:
    """More requests than rows, so that rows are refilled and moved around the continued ones."""
    asked = [request(1 + 5 * i % 23, salt=i, seed=i, max_new_tokens=2 + 7 * i % 31) for i in range(30)]
    wholes = results(engine.submit(asked))
    counts = [i % 3 * (len(whole.tokens) - 1) // 2 for i, whole in enumerate(wholes)]
    again = [begun(one, whole, count) for one, whole, count in zip(asked, wholes, counts, strict=True)]
    for whole, rest, count in zip(wholes, results(engine.submit(again)), counts, strict=True):
        assert whole.tokens[count:] == rest.tokens


def test_interrupted_again_and_again() -> None:
    asked = request(5, seed=3, max_new_tokens=60)
    engine = make_engine()
    (whole,) = results(engine.submit([asked]))
    engine.close()
    tokens: tuple[int, ...] = ()
    for steps in (7, 1, 20):
        batch = DecodeBatch(make_model(), max_length=MAX_LENGTH, max_rows=2, stop_text=None)
        batch.admit([Row(replace(asked, begun=tokens), Future())], version=0)
        for _ in range(steps):
            assert batch.step() == []
        ((_, part),) = batch.abort()
        assert len(part.tokens) == steps
        tokens += part.tokens
    assert tokens == whole.tokens[:28]


@pytest.mark.parametrize("cut", range(9, 13))
def test_a_stop_text_across_the_interruption(engine: EmbeddedEngine, cut: int) -> None:
    (free,) = results(engine.submit([request(max_new_tokens=30)]))
    wanted = spell(free.tokens[9:13])
    asked = request(max_new_tokens=30, stop=("never!", wanted))
    (whole,) = results(engine.submit([asked]))
    assert (whole.tokens, whole.finish_reason) == (free.tokens[:13], "stop")
    results(engine.submit([request(salt=3, seed=9, max_new_tokens=30)]))  # nothing of it is left in its row
    (rest,) = results(engine.submit([begun(asked, whole, cut)]))
    check_continued(whole, rest, cut)


def test_a_stop_text_does_not_reach_into_the_prompt(engine: EmbeddedEngine) -> None:
    (free,) = results(engine.submit([request(9, max_new_tokens=20)]))
    across = spell(request(9).prompt_tokens[-1:] + free.tokens[:1])
    assert across not in spell(free.tokens)
    asked = request(9, max_new_tokens=20, stop=(across,))
    (rest,) = results(engine.submit([replace(asked, begun=free.tokens[:3])]))
    assert (rest.tokens, rest.finish_reason) == (free.tokens[3:], "length")


def test_stop_tokens_and_length_count_what_was_begun(engine: EmbeddedEngine) -> None:
    (free,) = results(engine.submit([request(max_new_tokens=20)]))
    last = free.tokens[12]
    first = free.tokens.index(last)
    asked = request(max_new_tokens=20, stop_token_ids=(last,))
    (rest,) = results(engine.submit([replace(asked, begun=free.tokens[: max(first - 2, 0)])]))
    assert (rest.tokens[-1], rest.finish_reason) == (last, "stop")
    (rest,) = results(engine.submit([replace(request(max_new_tokens=20), begun=free.tokens[:19])]))
    assert (rest.tokens, rest.finish_reason) == (free.tokens[19:], "length")


def test_the_last_position_of_the_context_is_usable(engine: EmbeddedEngine) -> None:
    asked = request(5, max_new_tokens=MAX_LENGTH - 5)
    (whole,) = results(engine.submit([asked]))
    (rest,) = results(engine.submit([begun(asked, whole, MAX_LENGTH - 6)]))
    assert whole.tokens[-1:] == rest.tokens


def test_what_cannot_go_on_is_refused(engine: EmbeddedEngine) -> None:
    for tokens, problem in (
        ((1,) * 12, r"12 tokens were begun, and max_new_tokens is 12"),
        ((VOCAB,), r"token ids outside"),
        ((-1,), r"token ids outside"),
    ):
        with pytest.raises(ValueError, match=problem):
            engine.submit([request(), replace(request(), begun=tokens)])
    assert engine.samples_in_flight == 0
