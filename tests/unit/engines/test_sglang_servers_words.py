"""What servers say that are asked for other things than tokens, and what is not believed. Over HTTP, from a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from speaking import Speaker, speaking

from milesbatch.engines.sglang.client import ServerClient, ServerGoneError
from milesbatch.engines.sglang.weights import Prover, change
from milesbatch.errors import EngineError

NAME = "an-engine.3.7"


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    with speaking() as made:
        yield made


@dataclass
class Weights:
    version: int = 3
    weights_digest: str = "xxh128:" + "0" * 32

    def tensors(self) -> dict[str, Any]:
        return {}

    def write_model(self, directory: Path) -> None:
        raise NotImplementedError("nothing here loads them")


@dataclass
class Named:
    """A way that only hears how the weights are called."""

    names: list[str] = field(default_factory=list)

    async def load(self, client: Any, weights: Any, name: str, *, keep_cache: bool, limit_s: float) -> None:
        self.names.append(name)

    def forget(self, client: Any) -> None:
        """Nothing was kept."""


def ask(speaker: Speaker, method: str, *arguments: Any) -> Any:
    async def asking() -> Any:
        client = ServerClient(speaker.url)
        try:
            return await getattr(client, method)(*arguments)
        finally:
            await client.close()

    return asyncio.run(asking())


def changed(speaker: Speaker, prover: Prover, way: Named) -> None:
    async def changing() -> None:
        client = ServerClient(speaker.url)
        try:
            await change(client, Weights(), way, prover, NAME, pause="retract", limit_s=10)
        finally:
            await client.close()

    asyncio.run(changing())


@pytest.mark.parametrize("words", [b"all is well", b"", b"[]", b"null", b"7", b'{"a":', b"[" * 100_000, b"\xff\xfe"])
def test_what_must_be_a_json_object_is_nothing_else(speaker: Speaker, words: bytes) -> None:
    speaker.words["server_info"] = words
    with pytest.raises(ServerGoneError, match="server_info answered with something that is no JSON object"):
        ask(speaker, "get", "server_info", 10)


def test_control_calls_and_health_may_be_answered_in_plain_words(speaker: Speaker) -> None:
    speaker.words |= {"flush_cache": b"Cache flushed.", "abort_request": b"", "health_generate": b"OK"}
    assert ask(speaker, "post", "flush_cache", {}, 10) == ask(speaker, "post", "abort_request", {}, 10) == {}
    assert ask(speaker, "is_healthy", 10) is True


RANKS: list[Any] = [
    5, None, "x", {}, [], [5], [None], [[]], [{"x": 1}], [{"checksums": None}], [{"checksums": [1]}],
    [{"checksums": {"a": 1}}], [{"checksums": {"a": None}}], [{"checksums": {}}],
    [{"checksums": {"a": "0"}}, {"x": 1}], [{"checksums": {"a": "0"}}, {"checksums": {}}],
]  # fmt: skip


@pytest.mark.parametrize("can_expect", [True, False])
@pytest.mark.parametrize("ranks", RANKS, ids=json.dumps)
def test_checksums_that_are_none_prove_nothing(speaker: Speaker, ranks: Any, can_expect: bool) -> None:
    prover = Prover(can_expect)
    speaker.words["model_info"] = json.dumps({"weight_version": NAME}).encode()
    speaker.words["weights_checker"] = json.dumps({"success": True, "ranks": ranks}).encode()
    with pytest.raises(EngineError, match="told"):
        changed(speaker, prover, Named())
    assert speaker.asked[-1] == "continue_generation"

    assert prover.versions == {}


def test_weights_have_a_name_of_their_own_which_counts_when_they_are_proven(speaker: Speaker) -> None:
    prover, way = Prover(can_expect=False), Named()
    assert [prover.new_name(3), prover.new_name(3)] == [f"{prover.owner}.3.1", f"{prover.owner}.3.2"]
    assert prover.owner != Prover(can_expect=False).owner
    speaker.words["model_info"] = json.dumps({"weight_version": NAME}).encode()
    with pytest.raises(EngineError):
        changed(speaker, prover, way)
    assert prover.versions == {}
    speaker.words["weights_checker"] = b'{"ranks": [{"checksums": {"a": "0"}}]}'
    changed(speaker, prover, way)
    assert way.names == [NAME, NAME]
    assert prover.versions == {NAME: 3}


@pytest.mark.parametrize("name", ["3", "another.3", 3, None, ["x"]])
def test_another_engines_weights_are_not_taken_for_ones_own(speaker: Speaker, name: Any) -> None:
    speaker.words["model_info"] = json.dumps({"weight_version": name}).encode()
    with pytest.raises(EngineError, match="does somebody else change its weights"):
        changed(speaker, Prover(can_expect=False), Named())
    assert "weights_checker" not in speaker.asked
