"""What is taken from a server's answers, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.engines.protocol import GenerationRequest, SamplingParams
from milesbatch.engines.sglang.client import ServerGoneError
from milesbatch.engines.sglang.response import Response
from milesbatch.ids import VersionSpan


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def asked(most: int = 10, begun: tuple[int, ...] = (), **sampling: Any) -> Response:
    return Response(GenerationRequest((1, 2, 3), SamplingParams(most, **sampling), 0, begun))


def answer(
    tokens: Sequence[int], reason: str = "length", spans: Sequence[tuple[int, int, int]] = (), **meta: Any
) -> dict[str, Any]:
    stated = spans or [(7, 0, len(tokens))]
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in stated],
            "prompt_tokens": 3,
            "cached_tokens": 1,
            **meta,
        },
    }


def test_one_answer() -> None:
    response = asked(3)
    assert response.add(answer([4, 5, 6]), {7}, None) == "length"
    done = response.completion("length")
    assert (done.tokens, done.logprobs, done.versions) == ((4, 5, 6), (-0.5,) * 3, (VersionSpan(0, 7),))
    assert (response.cached_tokens, response.prompt_tokens) == (1, 3)


def test_several_answers_make_one_response() -> None:
    response = asked(10)
    assert response.add(answer([4, 5], "abort"), {7, 8, 9}, None) is None
    assert response.body("r", "c", None)["input_ids"] == [1, 2, 3, 4, 5]
    assert response.body("r", "c", None)["sampling_params"]["max_new_tokens"] == 8
    assert response.add(answer([6], "stop"), {7, 8, 9}, None) is None, "a stop that nobody asked for"
    assert response.add(answer([], "abort"), {7, 8, 9}, None) is None
    assert response.add(answer([5] * 7, spans=[(8, 0, 3), (9, 3, 7)]), {7, 8, 9}, None) == "length"
    assert response.completion("length").versions == (VersionSpan(0, 7), VersionSpan(3, 8), VersionSpan(6, 9))


def test_a_stop_cuts_what_a_server_drew_beyond_it() -> None:
    response = asked(9, stop_token_ids=(6,))
    assert response.add(answer([4, 5, 6, 7, 8], spans=[(7, 0, 3), (8, 3, 5)]), {7, 8}, None) == "stop"
    done = response.completion("stop")
    assert (done.tokens, len(done.logprobs), done.versions) == ((4, 5, 6), 3, (VersionSpan(0, 7),))


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    response = asked(3, stop_token_ids=(6,))
    assert response.add(answer([4, 5, 6]), {7}, None) == "stop"


def test_without_stop_tokens_the_models_end_is_ignored() -> None:
    assert asked().body("r", "c", None)["sampling_params"]["ignore_eos"] is True
    body = asked(stop_token_ids=(6,), stop=("x",)).body("r", "c", 5)["sampling_params"]
    assert (body["ignore_eos"], body["stop_token_ids"], body["stop"], body["sampling_seed"]) == (False, [6], ["x"], 5)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(0, 13), st.text("abcdef", min_size=1, max_size=3)
)
def test_stop_texts_end_at_the_first_token_that_completes_one(tokens: list[int], cut: int, wanted: str) -> None:
    cut = min(cut, len(tokens) - 1)
    response = asked(20, begun=tuple(tokens[:cut]), stop=(wanted,))
    reason = response.add(answer(tokens[cut:], "abort"), {7}, spell)
    ends = [end for end in range(cut + 1, len(tokens) + 1) if wanted in spell(tokens[:end])[-(len(wanted) + 8) :]]
    assert reason == ("stop" if ends else None)
    assert response.tokens == tokens[cut : ends[0] if ends else len(tokens)]


def _without(key: str) -> dict[str, Any]:
    body = answer([4, 5])
    (body if key in body else body["meta_info"]).pop(key)
    return body


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({}, "lacks"),
        ({"text": "4 5"}, "lacks"),
        (_without("output_ids"), "lacks"),
        (_without("finish_reason"), "lacks"),
        (_without("output_token_logprobs"), "2 tokens came with logprobs of 0"),
        (answer([4, 5], output_token_logprobs=[[-0.5, 4, None]]), "logprobs of 1"),
        (answer([4, 5], output_token_logprobs=[[-0.5, 4, None], [-0.5, 6, None]]), "or of others"),
        (answer([4], output_token_logprobs=[[float("nan"), 4, None]]), "not finite"),
        (answer([4], output_token_logprobs=[[None, 4, None]]), "lacks"),
        (answer([4] * 11), "11 tokens came where 10 were asked for"),
        (answer([]), "no token came"),
        (answer([], "stop"), "no token came"),
        (answer([4], spans=[(6, 0, 1)]), "were not activated here"),
        (answer([4, 5], spans=[(7, 1, 2)]), "were not activated here"),
        (answer([4], weight_versions=[{"version": "default", "start": 0, "end": 1}]), "lacks"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused_as_a_whole(bad: dict[str, Any], why: str) -> None:
    response = asked(10)
    with pytest.raises(ServerGoneError, match=why):
        response.add(bad, {7}, None)
    assert (response.tokens, response.logprobs, response.spans, response.prompt_tokens) == ([], [], [], 0)


def test_servers_of_before_tell_the_last_version_only() -> None:
    body = _without("weight_versions")
    body["meta_info"]["weight_version"] = "7"
    response = asked(2)
    assert response.add(body, {7}, None) == "length"
    assert response.spans == [VersionSpan(0, 7)]


# -- routed experts ---------------------------------------------------------------------------------------------------

SHAPE = (2, 2)
NONE = b"\xff" * 8


def told(*numbers: int) -> str:
    """Rows as a server tells them: all experts of a row have its number."""
    return base64.b64encode(np.array(numbers, "<i4").repeat(4).tobytes()).decode()


def entry(number: int) -> bytes:
    return np.full(4, number, "<u2").tobytes()


def entries_of(response: Response) -> list[bytes]:
    experts = response.completion("length").experts
    assert experts is not None
    return list(experts.entries())


def of_experts(most: int = 10, begun: tuple[int, ...] = (), **sampling: Any) -> Response:
    return Response(GenerationRequest((1, 2, 3), SamplingParams(most, **sampling), 0, begun), SHAPE)


def test_experts_of_all_tokens_but_the_last() -> None:
    response = of_experts(2)
    body = response.body("r", "c", None)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    assert response.add(answer([4, 5], routed_experts=told(1, 2, 3, 4)), {7}, None) == "length"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4)] + [NONE]


def test_each_answer_tells_the_experts_by_which_its_own_tokens_were_drawn() -> None:
    response = of_experts(4)
    assert response.add(answer([4, 5], "abort", routed_experts=told(1, 2, 3, 4)), {7, 8}, None) is None
    assert response.body("r", "c", None)["routed_experts_start_len"] == 4, "the last token, which was not fed yet"
    assert response.add(answer([6, 7], spans=[(8, 0, 2)], routed_experts=told(5, 6)), {7, 8}, None) == "length"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4, 5, 6)] + [NONE]


def test_of_what_was_begun_elsewhere_nothing_is_known() -> None:
    response = of_experts(4, begun=(8, 9))
    assert response.body("r", "c", None)["routed_experts_start_len"] == 4
    assert response.add(answer([4, 5], routed_experts=told(5, 6)), {7}, None) == "length"
    assert entries_of(response) == [NONE] * 4 + [entry(5), entry(6), NONE]


def test_what_was_computed_again_under_other_weights_is_not_known() -> None:
    """With one version it is the same again; with two it is what the newer weights made of older tokens."""
    for spans, known in (([(7, 0, 4)], 0), ([(7, 0, 2), (8, 2, 4)], 4)):
        response = of_experts(4)
        rows = told(*range(6))
        made = answer([4, 5, 6, 7], spans=spans, routed_experts=rows, num_retractions=1)
        assert response.add(made, {7, 8}, None) == "length"
        assert entries_of(response) == [NONE] * known + [entry(number) for number in range(known, 6)] + [NONE]
    response = of_experts(4)
    made = answer([4, 5, 6, 7], spans=[(7, 0, 2), (8, 2, 4)], routed_experts=told(*range(6)), num_retractions=0)
    assert response.add(made, {7, 8}, None) == "length"
    assert NONE not in entries_of(response)[:-1], "nothing was put back: keys, values and experts are those of then"


def test_a_request_that_was_put_back_and_aborted_has_lost_its_experts() -> None:
    response = of_experts(4)
    assert response.add(answer([4, 5], "abort"), {7}, None) is None
    assert response.add(answer([6, 7], routed_experts=told(5, 6)), {7}, None) == "length"
    assert entries_of(response) == [NONE] * 4 + [entry(5), entry(6), NONE]


def test_cut_at_a_stop_the_experts_are_too() -> None:
    response = of_experts(9, stop_token_ids=(5,))
    assert response.add(answer([4, 5, 6], routed_experts=told(1, 2, 3, 4, 5)), {7}, None) == "stop"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4)] + [NONE]


@pytest.mark.parametrize(
    "experts", [{}, {"routed_experts": told(1, 2, 3)}, {"routed_experts": "!"}, {"routed_experts": told(1, 2, -1, 3)}]
)
def test_an_answer_without_its_experts_is_not_whole(experts: dict[str, str]) -> None:
    response = of_experts(2)
    with pytest.raises(ServerGoneError, match="its routed experts are not 4 rows"):
        response.add(answer([4, 5], **experts), {7}, None)
    assert response.tokens == []
