"""Activation, refusal, abort and failure of the embedded engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import (
    MAX_LENGTH,
    Weights,
    make_engine,
    make_model,
    prompt,
    reference_logprobs,
    request,
    results,
    weights_of,
)
from transformers import DynamicCache

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import GenerationRequest, SamplingParams, VersionSpan
from milesbatch.errors import MilesbatchError, ModelError, RunFailedError

LONG = 400


class Watcher:
    """A detokenizer that says when the response has begun, and slows it down from then on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.calls = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.calls += 1
        if self.calls == 20:
            self.begun.set()
        if self.calls >= 20:
            time.sleep(0.002)
        return ""


def long_request(seed: int = 0) -> GenerationRequest:
    return GenerationRequest(prompt(6), SamplingParams(LONG, stop=("never",)), seed)


def replayed_logprobs(old: Any, new: Any, asked: GenerationRequest, tokens: Sequence[int], swap: int) -> list[float]:
    """Logprobs when token ``swap`` is the first under ``new``, on keys and values that ``old`` left behind."""
    cache = DynamicCache()
    ids = torch.tensor([[*asked.prompt_tokens, *tokens]])
    found: list[float] = []
    start = len(asked.prompt_tokens) - 1
    for place in range(start + len(tokens)):
        model = new if place >= start + swap else old
        with torch.no_grad():
            logits = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits[0, -1]
        if place >= start:
            found.append(float(torch.log_softmax(logits, dim=-1)[ids[0, place + 1]]))
    return found


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
def test_running_requests_go_on_under_new_weights() -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    watcher = Watcher()
    engine = make_engine(make_model(seed=0), max_length=512, stop_text=watcher)
    futures = engine.submit([long_request(1), long_request(2)])
    assert watcher.begun.wait(30)
    pause = engine.activate(weights_of(new, version=7))
    assert 0 < pause < 1
    assert engine.policy_version == 7
    for seed, found in zip((1, 2), results(futures), strict=True):
        assert len(found.tokens) == LONG
        first, second = found.versions
        assert (first, second.version) == (VersionSpan(0, 0), 7)
        assert 5 < second.start < LONG
        expected = replayed_logprobs(old, new, long_request(seed), found.tokens, second.start)
        assert found.logprobs == pytest.approx(expected, abs=1e-4)
        # The same tokens under the old weights alone agree up to the swap, and not after it.
        unswapped = reference_logprobs(old, long_request(seed), found.tokens)
        apart = (torch.tensor(found.logprobs) - unswapped).abs()
        assert apart[: second.start].max() < 1e-4 < apart[second.start]
    fresh = request(9, seed=3)
    (found,) = results(engine.submit([fresh]))
    assert found.versions == (VersionSpan(0, 7),)
    assert torch.allclose(torch.tensor(found.logprobs), reference_logprobs(new, fresh, found.tokens), atol=1e-4)
    engine.close()


def test_activated_weights_are_copies_and_tied_names_may_be_either() -> None:
    model, source = make_model(seed=0), make_model(seed=1)
    engine = make_engine(model)
    weights = weights_of(source, 1)
    weights.content["lm_head.weight"] = weights.content.pop("model.embed_tokens.weight")
    engine.activate(weights)
    for tensor in weights.content.values():
        tensor.zero_()
    one = request(temperature=0)
    (found,) = results(engine.submit([one]))
    assert torch.allclose(torch.tensor(found.logprobs), reference_logprobs(source, one, found.tokens), atol=1e-4)
    engine.close()


def _without(content: dict[str, torch.Tensor]) -> str:
    del content["model.layers.1.mlp.up_proj.weight"]
    return "lacks the tensor 'model.layers.1.mlp.up_proj.weight'"


def _extra(content: dict[str, torch.Tensor]) -> str:
    content["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    return "'model.layers.9.mlp.up_proj.weight'"


def _misshaped(content: dict[str, torch.Tensor]) -> str:
    content["model.norm.weight"] = torch.zeros(63)
    return r"'model.norm.weight' .* shape \(63,\), the model's has \(64,\)"


def _wide(content: dict[str, torch.Tensor]) -> str:
    content["model.norm.weight"] = torch.zeros(64, dtype=torch.float64)
    return "'model.norm.weight' .* would round"


def _twice(content: dict[str, torch.Tensor]) -> str:
    content["lm_head.weight"] = content["model.embed_tokens.weight"]
    return "tied tensors .*lm_head.weight.* more than once"


@pytest.mark.parametrize("spoil", [_without, _extra, _misshaped, _wide, _twice])
def test_weights_that_do_not_fit_leave_the_old_ones_in_use(spoil: Callable[[dict[str, torch.Tensor]], str]) -> None:
    engine = make_engine()
    before = results(engine.submit([request()]))
    weights = weights_of(make_model(seed=1), 1)
    message = spoil(weights.content)
    with pytest.raises(ModelError, match=message):
        engine.activate(weights)
    assert engine.policy_version == 0
    assert results(engine.submit([request()])) == before
    engine.close()


def test_nothing_is_generated_before_the_first_weights() -> None:
    engine = EmbeddedEngine(make_model(), max_length=MAX_LENGTH, max_concurrent_samples=2)
    assert engine.policy_version == -1
    with pytest.raises(MilesbatchError, match="before any weights are active"):
        engine.submit([request()])
    assert engine.samples_in_flight == 0
    engine.close()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(80, max_new_tokens=17), "prompt of 80 tokens and max_new_tokens 17 are more than the context of 96"),
        (request(0), "prompt is empty"),
        (request(max_new_tokens=0), "max_new_tokens is 0"),
        (request(temperature=-1.0), r"temperature is -1\.0"),
        (request(temperature=float("nan")), "temperature is nan"),
        (request(top_p=0.0), "top_p is 0"),
        (request(top_k=0), "top_k is 0"),
        (request(stop=("",)), "empty stop text"),
        (request(stop=("x",)), "detokenizer"),
        (replace(request(), prompt_tokens=(1, 61)), r"outside 0 \.\. 60"),
        (replace(request(), prompt_tokens=(-1,)), r"outside 0 \.\. 60"),
    ],
)
def test_a_request_that_cannot_be_generated_is_refused_with_its_whole_call(
    bad: GenerationRequest, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=rf"request 1 of 2 .*{message}"):
        engine.submit([request(), bad])
    assert engine.samples_in_flight == 0
    assert len(results(engine.submit([request(80, max_new_tokens=16)]))[0].tokens) == 16
    engine.close()


def test_close_ends_open_futures_as_abort_with_what_they_have() -> None:
    watcher = Watcher()
    engine = make_engine(rows=2, max_length=512, stop_text=watcher)
    futures = engine.submit([long_request(seed) for seed in range(5)])
    assert watcher.begun.wait(30)
    engine.close()
    found = results(futures)
    assert [one.finish_reason for one in found] == ["abort"] * 5
    assert 0 < len(found[0].tokens) < LONG
    assert len(found[0].tokens) == len(found[0].logprobs)
    assert [one.tokens for one in found[2:]] == [()] * 3
    assert engine.samples_in_flight == 0
    engine.close()
    with pytest.raises(MilesbatchError, match="closed"):
        engine.submit([request()])
    with pytest.raises(MilesbatchError, match="closed"):
        engine.activate(weights_of(make_model()))


def test_a_waiting_request_can_be_cancelled() -> None:
    watcher = Watcher()
    engine = make_engine(rows=1, max_length=512, stop_text=watcher)
    first, second, third = engine.submit([replace(long_request(), sampling=SamplingParams(60, stop=("n",)))] * 3)
    assert second.cancel()
    assert len(results([first, third])[1].tokens) == 60
    assert engine.samples_in_flight == 0
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_in_the_decode_thread_reaches_everyone() -> None:
    def broken(tokens: Sequence[int]) -> str:
        raise OSError("tokenizer gone")

    engine = make_engine(rows=2, stop_text=broken)
    futures = engine.submit([request(stop=("x",)), request(), request()])
    for future in futures:
        with pytest.raises(OSError, match="tokenizer gone"):
            future.result(timeout=30)
    with pytest.raises(OSError, match="tokenizer gone"):
        engine.submit([request()])
    with pytest.raises(OSError, match="tokenizer gone"):
        engine.activate(weights_of(make_model()))
    assert engine.samples_in_flight == 0
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_weights_that_give_no_finite_logits_are_named() -> None:
    engine = make_engine()
    weights: Weights = weights_of(make_model(), 3)
    weights.content["model.norm.weight"].fill_(torch.nan)
    engine.activate(weights)
    (future,) = engine.submit([request()])
    with pytest.raises(RunFailedError, match="not finite under policy version 3"):
        future.result(timeout=30)
    engine.close()


def test_models_that_cannot_be_driven_are_refused() -> None:
    with pytest.raises(ModelError, match="max_length 2000 is more than the model's context of 1024"):
        EmbeddedEngine(make_model(), max_length=2000, max_concurrent_samples=1)
    model = make_model()
    model.config.layer_types, model.config.sliding_window = ["full_attention", "sliding_attention"], 32
    with pytest.raises(ModelError, match="window of 32 is shorter than max_length 96"):
        EmbeddedEngine(model, max_length=96, max_concurrent_samples=1)
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="flash_attention_2"):
        EmbeddedEngine(model, max_length=96, max_concurrent_samples=1)
