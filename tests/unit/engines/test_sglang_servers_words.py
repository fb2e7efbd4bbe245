"""What servers say that are asked for other things than tokens, and what is not believed. Over HTTP, from a few lines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from milesbatch.engines.sglang.client import ServerClient, ServerGoneError
from milesbatch.engines.sglang.weights import Prover, change
from milesbatch.errors import EngineError


@dataclass
class Speaker:
    """Answers with the words that it is given for a path, else with an empty JSON object."""

    words: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    made = Speaker()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.strip("/")
            self.rfile.read(int(self.headers.get("content-length", 0)))
            made.asked.append(path)
            words = made.words.get(path, b"{}")
            self.send_response(200)
            self.send_header("content-length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()


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
            await change(client, Weights(), way, prover, pause="retract", limit_s=10)
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
    speaker.words["model_info"] = json.dumps({"weight_version": prover.name_of(3)}).encode()
    speaker.words["weights_checker"] = json.dumps({"success": True, "ranks": ranks}).encode()
    with pytest.raises(EngineError, match="told"):
        changed(speaker, prover, Named())
    assert speaker.asked[-1] == "continue_generation"


def test_weights_are_called_by_their_engine_and_their_version(speaker: Speaker) -> None:
    prover, way = Prover(can_expect=False), Named()
    speaker.words["model_info"] = json.dumps({"weight_version": f"{prover.owner}.3"}).encode()
    speaker.words["weights_checker"] = b'{"ranks": [{"checksums": {"a": "0"}}]}'
    changed(speaker, prover, way)
    assert way.names == [f"{prover.owner}.3"]
    assert prover.owner != Prover(can_expect=False).owner


@pytest.mark.parametrize("name", ["3", "another.3", 3, None, ["x"]])
def test_another_engines_weights_are_not_taken_for_ones_own(speaker: Speaker, name: Any) -> None:
    speaker.words["model_info"] = json.dumps({"weight_version": name}).encode()
    with pytest.raises(EngineError, match="does somebody else change its weights"):
        changed(speaker, Prover(can_expect=False), Named())
    assert "weights_checker" not in speaker.asked
