"""What every rollout engine must do, of the embedded engine and of a real SGLang server alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_server import (
    EOS,
    MAX_LENGTH,
    VOCAB,
    RealServer,
    Weights,
    make_model,
    prompt,
    reference,
    reference_logprobs,
    request,
    results,
    spell,
)

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import Completion, GenerationRequest, RolloutEngine, SamplingParams
from milesbatch.errors import MilesbatchError
from milesbatch.ids import VersionSpan

EXACT = 1e-5
pytestmark = pytest.mark.timeout(600)


@dataclass
class Kind:
    """One kind of engine: makes engines, which are all closed in the end."""

    name: str
    models: list[Any]
    memory: Path
    real: RealServer | None
    is_slow: bool = False
    made: list[RolloutEngine] = field(default_factory=list)

    def engine(self, version: int | None = 0) -> RolloutEngine:
        engine: RolloutEngine
        if self.real is not None:
            engine = self.real.attach(self.memory)
        else:
            engine = EmbeddedEngine(
                make_model(9), max_length=MAX_LENGTH, max_concurrent_samples=16, stop_text=self._spell
            )
        self.made.append(engine)
        if version is not None:
            engine.activate(Weights(version, self.models[version % len(self.models)]))
        return engine

    def slowly(self, is_slow: bool) -> None:
        """Each token takes some hundredths of a second; with the embedded engine when there are stop texts."""
        self.is_slow = is_slow
        if self.real is not None:
            self.real.slowly(0.02 if is_slow else None)

    def _spell(self, tokens: Sequence[int]) -> str:
        if self.is_slow:
            time.sleep(0.01)
        return spell(tokens)


@pytest.fixture(params=["embedded", "sglang"])
def kind(request: pytest.FixtureRequest, models: list[Any], tmp_path: Path) -> Iterator[Kind]:
    real = request.getfixturevalue("real") if request.param == "sglang" else None
    kind = Kind(request.param, models, tmp_path / "memory", real)
    yield kind
    kind.slowly(False)
    for engine in kind.made:
        engine.close()


def one(engine: RolloutEngine, asked: GenerationRequest) -> Completion:
    return results(engine.submit([asked]))[0]


def check_whole(done: Completion, version: int = 0) -> None:
    assert len(done.tokens) == len(done.logprobs) > 0
    assert done.versions == (VersionSpan(0, version),)


def never_stops(engine: RolloutEngine, count: int, **options: Any) -> list[Future[Completion]]:
    """Long requests; the stop text cannot be spelled, and makes the embedded engine slow."""
    return engine.submit([request(6, salt=i, seed=i, max_new_tokens=200, stop=("~",), **options) for i in range(count)])


@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_response_is_as_long_as_asked(kind: Kind, length: int) -> None:
    done = one(kind.engine(), request(max_new_tokens=length))
    check_whole(done)
    assert (len(done.tokens), done.finish_reason) == (length, "length")


def test_greedy_tokens_and_logprobs_are_those_of_a_full_forward(kind: Kind) -> None:
    asked = [request(3 + i, salt=i, temperature=0.0, max_new_tokens=30) for i in range(6)]
    for wanted, done in zip(asked, results(kind.engine().submit(asked)), strict=True):
        table = reference(kind.models[0], wanted, done.tokens)
        assert table.argmax(dim=1).tolist() == list(done.tokens)
        assert done.logprobs == pytest.approx(table.max(dim=1).values.tolist(), abs=EXACT)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_p": 0.8}, {"top_k": 5}], ids=str
)
def test_logprobs_are_of_divided_logits_whatever_is_cut_off(kind: Kind, sampling: dict[str, Any]) -> None:
    asked = [request(4, salt=i, seed=i, max_new_tokens=24, **sampling) for i in range(4)]
    temperature = sampling.get("temperature", 1.0)
    for wanted, done in zip(asked, results(kind.engine().submit(asked)), strict=True):
        assert done.logprobs == pytest.approx(reference_logprobs(kind.models[0], wanted, done, temperature), abs=EXACT)
        if "top_k" in sampling:
            ranks = reference(kind.models[0], wanted, done.tokens) > torch.tensor(done.logprobs)[:, None] + EXACT
            assert ranks.sum(dim=1).max() < 5


def test_a_stop_token_ends_a_response_and_stays(kind: Kind) -> None:
    engine = kind.engine()
    free = one(engine, request(temperature=0.0, max_new_tokens=60))
    stop = free.tokens[20]
    done = one(engine, request(temperature=0.0, max_new_tokens=60, stop_token_ids=(stop, 60)))
    first = min(place for place, token in enumerate(free.tokens) if token in (stop, 60))
    assert (done.tokens, done.finish_reason) == (free.tokens[: first + 1], "stop")
    assert done.logprobs == pytest.approx(free.logprobs[: first + 1], abs=EXACT)


def test_the_models_own_end_token_means_nothing_unless_asked_for(kind: Kind) -> None:
    """A prompt after which the model likes to end; found by a forward, so that the test cannot pass by luck."""
    for salt in range(400):
        asked = request(4, salt=salt, temperature=0.0, max_new_tokens=12)
        table = reference(kind.models[0], asked, (EOS,))
        if int(table[0].argmax()) == EOS:
            break
    else:
        pytest.fail("no prompt after which the model ends")
    engine = kind.engine()
    for stops in ((), (60,)):
        done = one(engine, replace(asked, sampling=replace(asked.sampling, stop_token_ids=stops)))
        assert done.tokens[0] == EOS
        assert len(done.tokens) == 12 or done.tokens[-1] in stops
        check_whole(done)
    done = one(engine, replace(asked, sampling=replace(asked.sampling, stop_token_ids=(EOS,))))
    assert (done.tokens, done.finish_reason) == ((EOS,), "stop")


@pytest.mark.parametrize(("first", "last"), [(9, 12), (0, 1), (25, 30)])
def test_a_stop_text_ends_a_response_and_stays(kind: Kind, first: int, last: int) -> None:
    engine = kind.engine()
    free = one(engine, request(temperature=0.0, max_new_tokens=40))
    wanted = spell(free.tokens[first:last])
    end = next(place for place in range(1, 41) if wanted in spell(free.tokens[:place]))
    done = one(engine, request(temperature=0.0, max_new_tokens=40, stop=("~", wanted)))
    assert (done.tokens, done.finish_reason) == (free.tokens[:end], "stop")


@pytest.mark.parametrize("count", [1, 7, 29])
def test_what_was_begun_goes_on_as_it_would_have(kind: Kind, count: int) -> None:
    engine = kind.engine()
    asked = request(temperature=0.0, max_new_tokens=30)
    whole = one(engine, asked)
    rest = one(engine, replace(asked, begun=whole.tokens[:count]))
    assert (rest.tokens, rest.finish_reason) == (whole.tokens[count:], "length")
    assert rest.logprobs == pytest.approx(whole.logprobs[count:], abs=EXACT)
    check_whole(rest)


@pytest.mark.parametrize("cut", range(9, 13))
def test_a_stop_text_reaches_back_into_what_was_begun(kind: Kind, cut: int) -> None:
    engine = kind.engine()
    free = one(engine, request(temperature=0.0, max_new_tokens=30))
    wanted = spell(free.tokens[9:13])
    asked = request(temperature=0.0, max_new_tokens=30, stop=(wanted,))
    end = next(place for place in range(1, 31) if wanted in spell(free.tokens[:place]))
    if end <= cut:
        pytest.fail("the text comes earlier; choose another prompt")
    rest = one(engine, replace(asked, begun=free.tokens[:cut]))
    assert (rest.tokens, rest.finish_reason) == (free.tokens[cut:end], "stop")


def test_a_stop_text_does_not_reach_into_the_prompt(kind: Kind) -> None:
    engine = kind.engine()
    free = one(engine, request(9, temperature=0.0, max_new_tokens=20))
    across = spell(request(9).prompt_tokens[-1:] + free.tokens[:1])
    assert across not in spell(free.tokens)
    done = one(engine, request(9, temperature=0.0, max_new_tokens=20, stop=(across,)))
    assert (done.tokens, done.finish_reason) == (free.tokens, "length")


def test_the_last_position_of_the_context_is_usable(kind: Kind) -> None:
    asked = request(50, temperature=0.0, max_new_tokens=MAX_LENGTH - 50)
    done = one(kind.engine(), asked)
    assert (len(done.tokens), done.finish_reason) == (MAX_LENGTH - 50, "length")
    asked = request(MAX_LENGTH - 1, max_new_tokens=1)
    assert len(one(kind.engine(), asked).tokens) == 1


def test_new_weights_in_the_middle(kind: Kind) -> None:
    engine = kind.engine(0)
    kind.slowly(True)
    futures = never_stops(engine, 3)
    time.sleep(1.0)
    paused_s = engine.activate(Weights(5, kind.models[1]))
    kind.slowly(False)
    assert 0 < paused_s < 30
    assert engine.policy_version == 5
    for done in results(futures):
        assert (len(done.tokens), done.finish_reason) == (200, "length")
        assert [span.version for span in done.versions] == [0, 5]
        assert 0 == done.versions[0].start < done.versions[1].start < 200
        before = done.versions[1].start
        asked = replace(request(6), prompt_tokens=done_prompt(futures, done))
        assert done.logprobs[:before] == pytest.approx(
            reference_logprobs(kind.models[0], asked, done)[:before], abs=EXACT
        )
    fresh = request(9, temperature=0.0)
    done = one(engine, fresh)
    check_whole(done, 5)
    assert done.logprobs == pytest.approx(reference_logprobs(kind.models[1], fresh, done), abs=EXACT)


def done_prompt(futures: Sequence[Future[Completion]], done: Completion) -> tuple[int, ...]:
    place = next(i for i, future in enumerate(futures) if future.result() is done)
    return prompt(6, salt=place)


def test_back_to_an_older_version(kind: Kind) -> None:
    engine = kind.engine(3)
    asked = request(temperature=0.0)
    newer = one(engine, asked)
    engine.activate(Weights(2, kind.models[2]))
    older = one(engine, asked)
    check_whole(older, 2)
    assert older.tokens != newer.tokens
    assert older.logprobs == pytest.approx(reference_logprobs(kind.models[2], asked, older), abs=EXACT)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (request(MAX_LENGTH - 3, max_new_tokens=4), f"more than the context of {MAX_LENGTH}"),
        (GenerationRequest((), SamplingParams(4), 0), "its prompt is empty"),
        (GenerationRequest((VOCAB,), SamplingParams(4), 0), "token ids outside"),
        (replace(request(), begun=(5,) * 12), "at least one must be left"),
        (request(temperature=-1.0), "temperature is -1.0"),
        (request(stop=("",)), "empty stop text"),
    ],
    ids=["long", "empty", "unknown", "begun", "temperature", "stop"],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_queued(
    kind: Kind, bad: GenerationRequest, problem: str
) -> None:
    engine = kind.engine()
    with pytest.raises(ValueError, match=f"request 1 of 2 .*{problem}"):
        engine.submit([request(), bad])
    assert engine.samples_in_flight == 0


def test_a_call_without_requests(kind: Kind) -> None:
    assert kind.engine().submit([]) == []


def test_nothing_is_generated_before_the_first_weights(kind: Kind) -> None:
    engine = kind.engine(None)
    assert engine.policy_version == -1
    with pytest.raises(MilesbatchError, match="before any weights are active"):
        engine.submit([request()])


def test_many_requests(kind: Kind) -> None:
    engine = kind.engine()
    asked = [request(1 + 5 * i % 23, salt=i % 7, seed=i, max_new_tokens=2 + 7 * i % 31) for i in range(80)]
    before = engine.tokens_generated
    done = results(engine.submit(asked))
    assert [len(each.tokens) for each in done] == [each.sampling.max_new_tokens for each in asked]
    for wanted, each in zip(asked[::16], done[::16], strict=True):
        assert each.logprobs == pytest.approx(reference_logprobs(kind.models[0], wanted, each), abs=EXACT)
    assert engine.tokens_generated - before >= sum(len(each.tokens) for each in done)
    assert engine.samples_in_flight == 0


def test_closing_keeps_what_was_drawn(kind: Kind) -> None:
    engine = kind.engine()
    kind.slowly(True)
    futures = never_stops(engine, 24)
    assert engine.samples_in_flight == 24
    time.sleep(1.5)
    engine.close()
    done = results(futures, timeout_s=1)
    assert {each.finish_reason for each in done} == {"abort"}
    begun = [each for each in done if each.tokens]
    assert len(begun) >= 8
    for each in begun:
        check_whole(each)
        assert len(each.tokens) < 200
    for place in (0, 3):
        asked = request(6, salt=place)
        assert done[place].logprobs == pytest.approx(reference_logprobs(kind.models[0], asked, done[place]), abs=EXACT)
    with pytest.raises(MilesbatchError, match="closed"):
        engine.submit([request()])


def test_a_cancelled_request_is_passed_over(kind: Kind) -> None:
    engine = kind.engine()
    futures = engine.submit([request(salt=i, max_new_tokens=30) for i in range(60)])
    cancelled = [future.cancel() for future in futures]
    for future, is_cancelled in zip(futures, cancelled, strict=True):
        if not is_cancelled:
            assert len(future.result(timeout=60).tokens) == 30
    check_whole(one(engine, request()))
