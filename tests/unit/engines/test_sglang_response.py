"""What is taken from a server's answers, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milesbatch.engines.protocol import GenerationRequest, SamplingParams
from milesbatch.engines.sglang.client import ServerGoneError
from milesbatch.engines.sglang.response import Response
from milesbatch.ids import VersionSpan
from milesbatch.trajectories.trajectory import is_logprob

VOCAB = 32


def ours(*versions: int) -> dict[str, int]:
    """Names that this engine gave."""
    return {f"me.{version}": version for version in versions}


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def asked(most: int = 10, begun: tuple[int, ...] = (), **sampling: Any) -> Response:
    return Response(GenerationRequest((1, 2, 3), SamplingParams(most, **sampling), 0, begun), VOCAB)


def answer(
    tokens: Sequence[int], reason: str = "length", spans: Sequence[tuple[int, int, int]] = (), **meta: Any
) -> dict[str, Any]:
    stated = spans or [(7, 0, len(tokens))]
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_versions": [{"version": f"me.{v}", "start": a, "end": b} for v, a, b in stated],
            "prompt_tokens": 3,
            "cached_tokens": 1,
            **meta,
        },
    }


def test_one_answer() -> None:
    response = asked(3)
    assert response.add(answer([4, 5, 6]), ours(7), None) == "length"
    done = response.completion("length")
    assert (done.tokens, done.logprobs, done.versions) == ((4, 5, 6), (-0.5,) * 3, (VersionSpan(0, 7),))
    assert (response.cached_tokens, response.prompt_tokens) == (1, 3)


def test_several_answers_make_one_response() -> None:
    response = asked(10)
    assert response.add(answer([4, 5], "abort"), ours(7, 8, 9), None) is None
    assert response.body("r", "c", None)["input_ids"] == [1, 2, 3, 4, 5]
    assert response.body("r", "c", None)["sampling_params"]["max_new_tokens"] == 8
    assert response.add(answer([6], "stop"), ours(7, 8, 9), None) is None, "a stop that nobody asked for"
    assert response.add(answer([], "abort"), ours(7, 8, 9), None) is None
    assert response.add(answer([5] * 7, spans=[(8, 0, 3), (9, 3, 7)]), ours(7, 8, 9), None) == "length"
    assert response.completion("length").versions == (VersionSpan(0, 7), VersionSpan(3, 8), VersionSpan(6, 9))


def test_a_stop_cuts_what_a_server_drew_beyond_it() -> None:
    response = asked(9, stop_token_ids=(6,))
    assert response.add(answer([4, 5, 6, 7, 8], spans=[(7, 0, 3), (8, 3, 5)]), ours(7, 8), None) == "stop"
    done = response.completion("stop")
    assert (done.tokens, len(done.logprobs), done.versions) == ((4, 5, 6), 3, (VersionSpan(0, 7),))


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    response = asked(3, stop_token_ids=(6,))
    assert response.add(answer([4, 5, 6]), ours(7), None) == "stop"


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
    reason = response.add(answer(tokens[cut:], "abort"), ours(7), spell)
    ends = [end for end in range(cut + 1, len(tokens) + 1) if wanted in spell(tokens[:end])[-(len(wanted) + 8) :]]
    assert reason == ("stop" if ends else None)
    assert response.tokens == tokens[cut : ends[0] if ends else len(tokens)]


def _without(key: str) -> dict[str, Any]:
    body = answer([4, 5])
    (body if key in body else body["meta_info"]).pop(key)
    return body


def with_logprob(logprob: Any) -> dict[str, Any]:
    return answer([4], output_token_logprobs=[[logprob, 4, None]])


def spanned(*spans: Any) -> dict[str, Any]:
    return answer([4, 5, 6], weight_versions=list(spans))


def span(start: Any, end: Any, version: Any = "me.7") -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({}, "lacks"),
        ({"text": "4 5"}, "lacks"),
        (_without("output_ids"), "lacks"),
        (_without("finish_reason"), "lacks"),
        (_without("output_token_logprobs"), "lacks"),
        (answer([4, 5], output_token_logprobs=[[-0.5, 4, None]]), "logprobs of 1"),
        (answer([4, 5], output_token_logprobs=[[-0.5, 4, None], [-0.5, 6, None]]), "or of others"),
        *(
            (answer([4, token]), "is no token id; the model has 0 .. 31")
            for token in (32, 10_000_000, -7, 2**40, 5.9, 5.0, True, None, "5", 10**4000)
        ),
        *(
            (with_logprob(logprob), "is not the logarithm of a probability")
            for logprob in (float("nan"), float("inf"), float("-inf"), 5.0, 1, 0.01, -1e300, -(10**400))
        ),
        *((with_logprob(logprob), "lacks") for logprob in (None, "-0.5", True, [])),
        (answer([4] * 11), "11 tokens came where 10 were asked for"),
        (answer([]), "no token came"),
        (answer([], "stop"), "no token came"),
        (answer([4], "error"), "ended with 'error'"),
        (answer([4], finish_reason="stop"), "lacks"),
        ({**answer([4]), "meta_info": []}, "lacks"),
        ({**answer([4]), "meta_info": None}, "lacks"),
        (answer([4], spans=[(6, 0, 1)]), "'me.6', which were not activated here; somebody else"),
        (answer([4], weight_versions=[span(0, 1, "they.7")]), "'they.7', which were not activated here; somebody else"),
        (answer([4], weight_versions=[span(0, 1, "7")]), "were not activated here"),
        (answer([4], weight_versions=[span(0, 1, "default")]), "were not activated here"),
        (answer([4], weight_versions=None, weight_version="they.7"), "were not activated here"),
        (answer([4], weight_versions=None, weight_version=7), "lacks"),
        (answer([4], weight_versions=None), "lacks"),
        (spanned(), "those of 0 tokens, and 3 came"),
        (spanned(span(0, 2)), "those of 2 tokens, and 3 came"),
        (spanned(span(1, 3)), "do not follow one another"),
        (spanned(span(0, 4)), "do not follow one another"),
        (spanned(span(0, 2), span(1, 3, "me.8")), "do not follow one another"),
        (spanned(span(0, 1), span(2, 3, "me.8")), "do not follow one another"),
        (spanned(span(-1, 3)), "do not follow one another"),
        (spanned(span(0, -1)), "do not follow one another"),
        (spanned(span(2, 3), span(0, 2)), "do not follow one another"),
        (spanned(span(0, 1, "me.8"), span(1, 3)), "policy version 7 comes after 8"),
        (spanned(span(0, 3, 7)), "lacks"),
        (spanned(span(0, 3.0)), "lacks"),
        (spanned(span("0", 3)), "lacks"),
        (spanned(7), "lacks"),
        (answer([4], weight_versions={}), "lacks"),
        *((answer([4], cached_tokens=count), "lacks") for count in ("abc", [1], 1.5, float("inf"), -1, 2**31, True)),
        *((answer([4], prompt_tokens=count), "lacks") for count in ("abc", [1], 1.5, float("inf"), -1, 2**31, True)),
    ],
)
def test_an_answer_that_is_not_whole_is_refused_as_a_whole(bad: dict[str, Any], why: str) -> None:
    response = asked(10)
    with pytest.raises(ServerGoneError, match=why):
        response.add(bad, ours(7, 8), None)
    assert (response.tokens, response.logprobs, response.spans, response.prompt_tokens) == ([], [], [], 0)


def test_versions_never_go_back_within_a_response() -> None:
    """Another server may not have changed its weights yet, while it goes on with what newer ones drew."""
    response = asked(10)
    assert response.add(answer([4], "abort", spans=[(8, 0, 1)]), ours(7, 8), None) is None
    with pytest.raises(ServerGoneError, match="policy version 7 comes after 8"):
        response.add(answer([5]), ours(7, 8), None)
    assert response.tokens == [4]


def test_a_logprob_may_be_rounded_to_just_above_0() -> None:
    assert asked(1).add(with_logprob(2e-7), ours(7), None) == "length"
    assert asked(1).add(with_logprob(-104.0), ours(7), None) == "length"


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**4000), 2**63])
ODD = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["me.7", "me.8", "stop", "abort"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "start", "end", "version", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in _places(part, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], odd)
    return copy


GOOD = answer([4, 5, 6], spans=[(7, 0, 1), (8, 1, 3)], num_retractions=0, routed_experts="AAAA")
PLACES = [path for path in _places(GOOD) if path]


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=2), st.booleans())
def test_whatever_an_answer_says_it_is_whole_or_refused(changes: list[tuple[Any, Any]], has_experts: bool) -> None:
    body = GOOD
    for path, odd in changes:
        try:
            body = _with(body, path, odd)
        except (KeyError, IndexError, TypeError):
            continue  # the first change took its place away
    response = of_experts(3) if has_experts else asked(3)
    try:
        reason = response.add(body, ours(7, 8), None)
    except ServerGoneError:
        assert (response.tokens, response.spans, response.prompt_tokens, response.cached_tokens) == ([], [], 0, 0)
        return
    done = response.completion(reason or "abort")
    assert len(done.tokens) == len(done.logprobs) <= 3
    assert all(type(token) is int and 0 <= token < VOCAB for token in done.tokens)
    assert all(type(logprob) is float and is_logprob(logprob) for logprob in done.logprobs)
    starts = [span.start for span in done.versions]
    assert starts == sorted(set(starts)) and starts[:1] == ([0] if done.tokens else [])
    assert {span.version for span in done.versions} <= {7, 8}


def test_servers_of_before_tell_the_last_version_only() -> None:
    body = _without("weight_versions")
    body["meta_info"]["weight_version"] = "me.7"
    response = asked(2)
    assert response.add(body, ours(7), None) == "length"
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
    return Response(GenerationRequest((1, 2, 3), SamplingParams(most, **sampling), 0, begun), VOCAB, SHAPE)


def test_experts_of_all_tokens_but_the_last() -> None:
    response = of_experts(2)
    body = response.body("r", "c", None)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    assert response.add(answer([4, 5], routed_experts=told(1, 2, 3, 4)), ours(7), None) == "length"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4)] + [NONE]


def test_each_answer_tells_the_experts_by_which_its_own_tokens_were_drawn() -> None:
    response = of_experts(4)
    assert response.add(answer([4, 5], "abort", routed_experts=told(1, 2, 3, 4)), ours(7, 8), None) is None
    assert response.body("r", "c", None)["routed_experts_start_len"] == 4, "the last token, which was not fed yet"
    assert response.add(answer([6, 7], spans=[(8, 0, 2)], routed_experts=told(5, 6)), ours(7, 8), None) == "length"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4, 5, 6)] + [NONE]


def test_of_what_was_begun_elsewhere_nothing_is_known() -> None:
    response = of_experts(4, begun=(8, 9))
    assert response.body("r", "c", None)["routed_experts_start_len"] == 4
    assert response.add(answer([4, 5], routed_experts=told(5, 6)), ours(7), None) == "length"
    assert entries_of(response) == [NONE] * 4 + [entry(5), entry(6), NONE]


def test_what_was_computed_again_under_other_weights_is_not_known() -> None:
    """With one version it is the same again; with two it is what the newer weights made of older tokens."""
    for spans, known in (([(7, 0, 4)], 0), ([(7, 0, 2), (8, 2, 4)], 4)):
        response = of_experts(4)
        rows = told(*range(6))
        made = answer([4, 5, 6, 7], spans=spans, routed_experts=rows, num_retractions=1)
        assert response.add(made, ours(7, 8), None) == "length"
        assert entries_of(response) == [NONE] * known + [entry(number) for number in range(known, 6)] + [NONE]
    response = of_experts(4)
    made = answer([4, 5, 6, 7], spans=[(7, 0, 2), (8, 2, 4)], routed_experts=told(*range(6)), num_retractions=0)
    assert response.add(made, ours(7, 8), None) == "length"
    assert NONE not in entries_of(response)[:-1], "nothing was put back: keys, values and experts are those of then"


def test_a_request_that_was_put_back_and_aborted_has_lost_its_experts() -> None:
    response = of_experts(4)
    assert response.add(answer([4, 5], "abort"), ours(7), None) is None
    assert response.add(answer([6, 7], routed_experts=told(5, 6)), ours(7), None) == "length"
    assert entries_of(response) == [NONE] * 4 + [entry(5), entry(6), NONE]


def test_cut_at_a_stop_the_experts_are_too() -> None:
    response = of_experts(9, stop_token_ids=(5,))
    assert response.add(answer([4, 5, 6], routed_experts=told(1, 2, 3, 4, 5)), ours(7), None) == "stop"
    assert entries_of(response) == [entry(number) for number in (1, 2, 3, 4)] + [NONE]


@pytest.mark.parametrize(
    "experts", [{}, {"routed_experts": told(1, 2, 3)}, {"routed_experts": "!"}, {"routed_experts": told(1, 2, -1, 3)}]
)
def test_an_answer_without_its_experts_is_not_whole(experts: dict[str, str]) -> None:
    response = of_experts(2)
    with pytest.raises(ServerGoneError, match="its routed experts are not 4 rows"):
        response.add(answer([4, 5], **experts), ours(7), None)
    assert response.tokens == []
