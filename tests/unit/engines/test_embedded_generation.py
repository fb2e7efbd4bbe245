"""What the engine generates: equal to transformers, to itself, and to what the request asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from engine_models import VOCAB, make_engine, make_model, prompt, reference_logprobs, request, results

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import Completion, GenerationRequest, SamplingParams, VersionSpan


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    engine = make_engine(stop_text=lambda tokens: "".join(chr(97 + token % 26) for token in tokens))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen3", "sdpa"), ("qwen3", "eager"), ("qwen2", "sdpa"), ("llama", "sdpa"), ("qwen3_moe", "sdpa")],
)
def test_greedy_equals_transformers_generate(family: str, attention: str) -> None:
    model = make_model(family, attention=attention)
    asked = [request(length, salt=length, temperature=0, max_new_tokens=24) for length in (1, 2, 9, 9, 17, 40, 3)]
    engine = make_engine(model, rows=3)
    found = results(engine.submit(asked))
    engine.close()
    for one, completion in zip(asked, found, strict=True):
        ids = torch.tensor([one.prompt_tokens])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert completion.tokens == tuple(expected[0, ids.shape[1] :].tolist())
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logprobs_equal_a_full_forward(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model, rows=4)
    asked = [request(3 + i, salt=i % 4, seed=i, temperature=0.5 + i / 4, max_new_tokens=5 + 3 * i) for i in range(10)]
    for one, completion in zip(asked, results(engine.submit(asked)), strict=True):
        expected = reference_logprobs(model, one, completion.tokens, one.sampling.temperature)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    engine.close()


def test_bfloat16_logprobs_are_near_a_full_forward() -> None:
    model = make_model().to(torch.bfloat16)
    engine = make_engine(model)
    asked = request(8, temperature=1.0, max_new_tokens=20)
    (found,) = results(engine.submit([asked]))
    engine.close()
    assert torch.allclose(torch.tensor(found.logprobs), reference_logprobs(model, asked, found.tokens), atol=0.25)


def test_refilled_rows_generate_what_they_would_alone(engine: EmbeddedEngine) -> None:
    """More requests than rows, of very different lengths: rows are refilled and moved, nothing gets mixed up."""
    asked = [request(1 + 5 * i % 23, salt=i, seed=i, max_new_tokens=1 + 7 * i % 31) for i in range(40)]
    together = results(engine.submit(asked))
    assert [len(found.tokens) for found in together] == [one.sampling.max_new_tokens for one in asked]
    for one, found in zip(asked, together, strict=True):
        (alone,) = results(engine.submit([one]))
        assert found.tokens == alone.tokens
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert found.versions == (VersionSpan(0, 0),)
    assert engine.samples_in_flight == 0


def test_siblings_share_a_prompt_and_differ_by_seed(engine: EmbeddedEngine) -> None:
    asked = [request(20, salt=i // 4, seed=i) for i in range(8)]
    found = results(engine.submit(asked))
    assert len({one.tokens for one in found}) == 8
    again = results(engine.submit([request(20, salt=1, seed=6)]))
    assert again[0].tokens == found[6].tokens


def test_long_prompts_are_prefilled_in_parts(monkeypatch: pytest.MonkeyPatch, engine: EmbeddedEngine) -> None:
    asked = [request(10 + i, salt=i // 2, seed=i) for i in range(8)]
    whole = results(engine.submit(asked))
    monkeypatch.setattr("milesbatch.engines.decode_batch._PREFILL_TOKENS", 30)
    parts = results(engine.submit(asked))
    assert [one.tokens for one in parts] == [one.tokens for one in whole]


def test_stop_tokens_stay_and_win_over_length(engine: EmbeddedEngine) -> None:
    (free,) = results(engine.submit([request(max_new_tokens=12)]))
    last = free.tokens[-1]
    first = free.tokens.index(last)
    stop = request(max_new_tokens=first + 1, stop_token_ids=(VOCAB - 1 if last != VOCAB - 1 else 0, last))
    other = request(salt=1, max_new_tokens=30)
    found, unaffected = results(engine.submit([stop, other]))
    assert (found.tokens[-1], found.finish_reason) == (last, "stop")
    assert len(found.tokens) <= first + 1
    assert (len(unaffected.tokens), unaffected.finish_reason) == (30, "length")


def test_stop_texts_across_tokens(engine: EmbeddedEngine) -> None:
    def spell(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    (free,) = results(engine.submit([request(max_new_tokens=30)]))
    wanted = spell(free.tokens[9:13])
    end = spell(free.tokens).index(wanted) + 4
    found, other = results(engine.submit([request(max_new_tokens=30, stop=("never!", wanted)), request(salt=3)]))
    assert found.tokens == free.tokens[:end]
    assert found.finish_reason == "stop"
    assert other.finish_reason == "length"


def test_top_k_and_top_p_restrict_what_is_drawn(engine: EmbeddedEngine) -> None:
    greedy, one, nucleus, five = results(
        engine.submit(
            [
                request(temperature=0, max_new_tokens=40),
                request(top_k=1, seed=5, max_new_tokens=40),
                request(top_p=1e-6, seed=6, max_new_tokens=40),
                request(top_k=5, seed=7, temperature=3.0, max_new_tokens=40),
            ]
        )
    )
    assert greedy.tokens == one.tokens == nucleus.tokens
    ids = torch.tensor([[*prompt(5), *five.tokens]])
    with torch.no_grad():
        logits = make_model()(input_ids=ids, use_cache=False).logits[0, 4:-1]
    ranks = (logits > logits.gather(1, torch.tensor(five.tokens)[:, None])).sum(dim=1)
    assert int(ranks.max()) < 5
    assert len(set(ranks.tolist())) > 1


def test_drawn_shares_follow_the_model(engine: EmbeddedEngine) -> None:
    count = 3000
    found = results(engine.submit([request(seed=seed, max_new_tokens=1, temperature=0.7) for seed in range(count)]))
    with torch.no_grad():
        logits = make_model()(input_ids=torch.tensor([prompt(5)])).logits[0, -1]
    expected = torch.softmax(logits / 0.7, dim=-1)
    shares = torch.bincount(torch.tensor([one.tokens[0] for one in found]), minlength=VOCAB) / count
    assert torch.allclose(shares, expected, atol=0.04)


def same_call() -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt(3 + i % 5, i % 4), SamplingParams(10 + i, stop_token_ids=(i, 7)), seed=i)
        for i in range(20)
    ]


def test_the_same_call_gives_the_same_bits(engine: EmbeddedEngine) -> None:
    assert results(engine.submit(same_call())) == results(engine.submit(same_call()))


def test_isolated_calls_give_the_same_bits_when_they_overlap() -> None:
    engine = make_engine(isolate_calls=True)
    alone = results(engine.submit(same_call()))
    calls = [engine.submit(same_call()) for _ in range(3)]
    assert [results(call) for call in calls] == [alone] * 3
    engine.close()


def test_the_same_call_gives_the_same_bits_in_another_process() -> None:
    script = (
        "from test_embedded_generation import *; engine = make_engine();"
        "print([(one.tokens, [p.hex() for p in one.logprobs]) for one in results(engine.submit(same_call()))])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    outputs = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[0].stdout.count("0x") > 100


def test_counters_count(engine: EmbeddedEngine) -> None:
    before = engine.tokens_generated
    found: list[Completion] = results(engine.submit([request(max_new_tokens=n) for n in (3, 9)]))
    assert engine.tokens_generated - before == sum(len(one.tokens) for one in found) == 12
    assert engine.submit([]) == []
