"""Coming to a router: what it has behind it, and what is said of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from speaking import Speaker, speaking

from milesbatch.engines.sglang import router as router_module
from milesbatch.engines.sglang.router import Router
from milesbatch.errors import EngineError, InputError


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Speaker]:
    monkeypatch.setattr(router_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(router_module, "_SETTLE_S", 0.2)
    with speaking() as made:
        yield made


def come_to(url: str, timeout_s: float) -> list[str]:
    """What is told of a router that should have A and B behind it."""
    told: list[str] = []

    async def coming() -> None:
        router = Router(url)
        try:
            await router.await_up(["http://a:1", "http://b:1"], timeout_s, told.append)
        finally:
            await router.close()

    asyncio.run(coming())
    return told


def workers(*urls: str) -> bytes:
    return json.dumps({"workers": [{"url": url} for url in urls]}).encode()


def test_all_that_should_be_there_are(speaker: Speaker) -> None:
    speaker.words["workers"] = workers("http://a:1/", "http://b:1")
    assert come_to(speaker.url, 20) == []


def test_others_are_told_and_those_that_lack_after_a_moment(speaker: Speaker) -> None:
    speaker.words["workers"] = workers("http://a:1", "http://c:1")
    others, lacking = come_to(speaker.url, 20)
    assert "has http://c:1 behind it, whose answers are not taken" in others
    assert "does not have http://b:1 behind it" in lacking
    assert len(speaker.asked) > 3, "it may still have been looking at them"


@pytest.mark.parametrize(
    "said", [workers(), workers("http://c:1"), b'{"workers": 7}', b'{"workers": [null, {}]}', b"{}"]
)
def test_a_router_without_any_of_them_is_of_no_use(speaker: Speaker, said: bytes) -> None:
    speaker.words["workers"] = said
    with pytest.raises(
        EngineError, match=r"has none of http://a:1, http://b:1 behind it, for 1 s(.|\n)*sglang.routers"
    ):
        come_to(speaker.url, 1.0)


def test_one_that_does_not_answer_is_waited_for_and_named(speaker: Speaker) -> None:
    speaker.words["workers"] = b"not yet"
    with pytest.raises(EngineError, match=r"does not answer, for 1 s: .*not yet"):
        come_to(speaker.url, 1.0)
    with pytest.raises(EngineError, match="cannot be asked"):
        come_to("http://127.0.0.1:9", 1.0)


@pytest.mark.parametrize(
    ("status", "why"), [(404, "is no router"), (401, "wants another key"), (403, "wants another key")]
)
def test_what_is_no_router_of_this_site_is_named_at_once(speaker: Speaker, status: int, why: str) -> None:
    speaker.status["workers"] = status
    with pytest.raises(InputError, match=why):
        come_to(speaker.url, 20)
