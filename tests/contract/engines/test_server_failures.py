"""What goes wrong between an engine and a real server costs time, and never a token that nobody drew."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import FaultyProxy
from real_server import MAX_LENGTH, VOCAB, RealServer, Weights, make_engine, reference_logprobs, request, results

from milesbatch.engines.sglang.fitness import Needed
from milesbatch.engines.sglang.serving import AttachedServer
from milesbatch.errors import EngineError, InputError, RunFailedError
from milesbatch.ids import VersionSpan

EXACT = 1e-5
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def proxy(real: RealServer) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(real.place.url)
    yield proxy
    proxy.close()


def check_all_right(models: list[Any], real: RealServer, proxy: FaultyProxy, memory: Path, **options: Any) -> None:
    engine = real.attach(memory, url=proxy.url, **options)
    engine.activate(Weights(0, models[0]))
    asked = [request(4, salt=i, seed=i, max_new_tokens=12) for i in range(24)]
    for wanted, done in zip(asked, results(engine.submit(asked)), strict=True):
        assert (len(done.tokens), done.finish_reason, done.versions) == (12, "length", (VersionSpan(0, 0),))
        assert done.logprobs == pytest.approx(reference_logprobs(models[0], wanted, done), abs=EXACT)
    assert proxy.asked > 24, "nothing was spoiled"
    engine.close()


@pytest.mark.parametrize("fault", ["500", "lost", "cut"])
def test_some_answers_fail(real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path, fault: str) -> None:
    chance = random.Random(fault)
    proxy.spoil = lambda number: fault if number == 3 or chance.random() < 0.25 else "pass"
    check_all_right(models, real, proxy, tmp_path)


def test_some_answers_are_too_slow(real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.spoil = lambda number: "slow:20" if number in (1, 5) else "pass"
    began_s = time.monotonic()
    check_all_right(models, real, proxy, tmp_path, request_timeout_s=8.0)
    assert time.monotonic() - began_s < 60


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "why"),
    [("500", "answered 500: spoiled on purpose"), ("lost", "cannot be asked"), ("cut", "cannot be asked")],
)
def test_when_no_answer_ever_comes_the_request_fails_with_its_reason(
    real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path, fault: str, why: str
) -> None:
    engine = real.attach(tmp_path, url=proxy.url)
    engine.activate(Weights(0, models[0]))
    proxy.spoil = lambda number: fault
    (future,) = engine.submit([request()])
    with pytest.raises(RunFailedError, match=f"got no answer 6 times, .*{why}"):
        future.result(timeout=60)
    assert engine.samples_in_flight == 0
    proxy.spoil = lambda number: "pass"
    assert len(results(engine.submit([request()]))[0].tokens) == 12
    engine.close()


def test_a_refusal_is_not_repeated(real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path) -> None:
    engine = real.attach(tmp_path, url=proxy.url)
    engine.activate(Weights(0, models[0]))
    proxy.spoil = lambda number: "400"
    (future,) = engine.submit([request()])
    with pytest.raises(RunFailedError, match=r"refused a request .* answered 400: spoiled on purpose"):
        future.result(timeout=60)
    assert proxy.asked == 1
    engine.close()


def test_too_long_a_prompt_never_reaches_the_server(
    real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path
) -> None:
    engine = real.attach(tmp_path, url=proxy.url)
    engine.activate(Weights(0, models[0]))
    with pytest.raises(ValueError, match=f"more than the context of {MAX_LENGTH}"):
        engine.submit([request(MAX_LENGTH, max_new_tokens=1)])
    assert proxy.asked == 0
    engine.close()


def test_a_server_that_is_not_there(real: RealServer, models: list[Any], tmp_path: Path) -> None:
    told: list[str] = []
    engine = real.attach(tmp_path, url="http://127.0.0.1:9", start_timeout_s=1.0, told=told)
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9 does not generate"):
        engine.await_server()
    with pytest.raises(EngineError, match="does not generate"):
        engine.activate(Weights(0, models[0]))
    assert sum("does not generate" in text for text in told) == 3
    assert told[-1] == "http://127.0.0.1:9 is given up, as all others are"
    engine.close()


def test_a_router_is_no_server_and_is_named_at_once(tmp_path: Path) -> None:
    """A router answers for its servers, but for control calls, of which it knows none."""

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health_generate" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    router = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=router.serve_forever, daemon=True).start()
    engine = make_engine([AttachedServer(f"http://127.0.0.1:{router.server_port}")], tmp_path)
    with pytest.raises(InputError, match=r"is no SGLang server(.|\n)*name the servers in rollout.sglang.urls"):
        engine.await_server()
    engine.close()
    router.shutdown()
    router.server_close()


def test_a_server_that_this_run_cannot_use_is_named_and_stays_as_it_is(
    real: RealServer, models: list[Any], tmp_path: Path
) -> None:
    """Weights of another shape would end it."""
    model = real.place.settings.model
    config = json.loads((model / "config.json").read_text())
    for needed, why in (
        (
            Needed(config | {"vocab_size": VOCAB + 7}, "float32", MAX_LENGTH),
            f"vocab_size {VOCAB} instead of {VOCAB + 7}",
        ),
        (Needed(config, "bfloat16", MAX_LENGTH), "--dtype=bfloat16"),
        (Needed(config, "float32", MAX_LENGTH + 17), f"--context-length={MAX_LENGTH + 33}"),
    ):
        engine = real.attach(tmp_path, needed=needed)
        with pytest.raises(InputError, match=why):
            engine.await_server()
        engine.close()
    engine = real.attach(tmp_path, needed=Needed.of_model(model, "float32", MAX_LENGTH))
    engine.activate(Weights(3, models[1]))
    asked = request(5)
    (done,) = results(engine.submit([asked]))
    assert done.logprobs == pytest.approx(reference_logprobs(models[1], asked, done), abs=1e-5)
    engine.close()


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_server_that_wants_another_key_is_named_at_once(real: RealServer, tmp_path: Path, key: str) -> None:
    engine = make_engine([AttachedServer(real.place.url, key)], tmp_path)
    with pytest.raises(InputError, match=rf"wants {'another' if key else 'a'} key(.|\n)*rollout.sglang.key_file"):
        engine.await_server()
    engine.close()


def test_a_server_that_goes_away_and_comes_back(
    real: RealServer, models: list[Any], proxy: FaultyProxy, tmp_path: Path
) -> None:
    """It is not ours to start: requests wait for it, and it is not used before it has the weights again."""
    told: list[str] = []
    engine = real.attach(tmp_path, url=proxy.url, told=told)
    engine.activate(Weights(50, models[0]))
    proxy.spoil = lambda number: "lost"
    asked = [request(4, salt=i, seed=i) for i in range(4)]
    futures = engine.submit(asked)
    while proxy.asked < 4:
        time.sleep(0.05)
    proxy.close()
    while not any("does not generate any more" in text for text in told):
        time.sleep(0.1)
    other = real.attach(tmp_path / "other")
    other.activate(Weights(7, models[1]))
    other.close()
    again = FaultyProxy(real.place.url, port=proxy.port)
    for wanted, done in zip(asked, results(futures), strict=True):
        assert (len(done.tokens), done.versions) == (12, (VersionSpan(0, 50),))
        assert done.logprobs == pytest.approx(reference_logprobs(models[0], wanted, done), abs=EXACT)
    engine.close()
    again.close()


def test_two_engines_on_one_server_never_take_each_others_tokens(
    real: RealServer, models: list[Any], tmp_path: Path
) -> None:
    """Versions have the same numbers in every run; the names of weights say whose they are."""
    told: list[str] = []
    mine, theirs = real.attach(tmp_path / "mine", told=told), real.attach(tmp_path / "theirs")
    mine.activate(Weights(3, models[0]))
    theirs.activate(Weights(3, models[1]))
    asked = request(4)
    (done,) = results(mine.submit([asked]))
    assert done.versions == (VersionSpan(0, 3),)
    assert done.logprobs == pytest.approx(reference_logprobs(models[0], asked, done), abs=EXACT)
    assert any("somebody else changes this server's weights" in text for text in told), told
    mine.close()
    theirs.close()
