"""A real router (sglang-router) in front of two real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import PYTHON, Weights, make_engine, make_model, replayed_logprobs, request, results, settings_of
from site_router import SiteRouter

from milesbatch.engines.sglang.engine import SGLangEngine
from milesbatch.engines.sglang.router import Router
from milesbatch.engines.sglang.serving import AttachedServer, StartedServer
from milesbatch.errors import EngineError, RunFailedError

EXACT = 1e-5
KEY = "what-servers-of-the-site-want"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


class Site:
    """Two servers that somebody runs, and a router in front of them."""

    def __init__(self, directory: Path, model: Any) -> None:
        Weights(0, model).write_model(directory / "model")
        settings = settings_of(directory / "model")
        self.places = [
            StartedServer(f"server-{i}", settings, directory / f"server-{i}.log", directory / "memory", key=KEY)
            for i in range(2)
        ]
        self.owner = make_engine(self.places, directory / "owner")
        self.owner.activate(Weights(0, model))
        until(lambda: all(server.state == "serving" for server in self.owner._fleet.servers), "both serve")
        self.urls = [place.url for place in self.places]
        self.router = SiteRouter.start(PYTHON, self.urls, KEY, directory / "router.log")

    def engine(self, memory: Path, told: list[str] | None = None, **options: Any) -> SGLangEngine:
        places = [AttachedServer(url, KEY) for url in self.urls]
        engine = make_engine(places, memory, told=told, router=Router(self.router.url, KEY), **options)
        engine.await_server()
        return engine

    def prefills(self) -> list[int]:
        return [place.log.read_text(errors="replace").count("Prefill batch") for place in self.places]

    def slowly(self, seconds: float | None) -> None:
        for url in self.urls:
            answer = httpx.post(
                f"{url}/slow_down",
                json={"forward_sleep_time": seconds},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=60,
                trust_env=False,
            )
            assert answer.status_code == 200

    def close(self) -> None:
        self.router.kill()
        self.owner.close()


def until(look: Any, what: str, timeout_s: float = 400.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline_s, f"waited until {what}"
        time.sleep(0.2)


def both_serve(engine: SGLangEngine) -> bool:
    return all(server.state == "serving" for server in engine._fleet.servers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, models: list[Any]) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), models[0])
    yield site
    site.close()


def check(asked: list[Any], found: list[Any], models: dict[int, Any], count: int) -> None:
    for wanted, done in zip(asked, found, strict=True):
        assert (len(done.tokens), done.finish_reason) == (count, "length")
        assert done.logprobs == pytest.approx(replayed_logprobs(models, wanted, done), abs=EXACT)


def test_requests_go_through_it_and_weights_to_each_server(site: Site, models: list[Any], tmp_path: Path) -> None:
    told: list[str] = []
    engine = site.engine(tmp_path, told)
    engine.activate(Weights(10, models[1]))
    until(lambda: both_serve(engine), "both have the weights")
    before = site.prefills()
    asked = [request(5, salt=i) for i in range(12)]
    check(asked, results(engine.submit(asked)), {10: models[1]}, 12)
    assert all(now > then for now, then in zip(site.prefills(), before, strict=True)), "both were asked"
    assert not [text for text in told if "router" in text]
    engine.close()


def test_sequences_live_through_updates_behind_it(site: Site, models: list[Any], tmp_path: Path) -> None:
    engine = site.engine(tmp_path, pause="in_place")
    engine.activate(Weights(10, models[0]))
    until(lambda: both_serve(engine), "both have the weights")
    asked = [request(7, salt=i, max_new_tokens=150) for i in range(4)]
    site.slowly(0.02)
    futures = engine.submit(asked)
    for number in (1, 2, 3):
        time.sleep(0.6)
        engine.activate(Weights(10 + number, models[number]))
    site.slowly(None)
    found = results(futures)
    check(asked, found, {10 + number: model for number, model in enumerate(models)}, 150)
    assert all([span.version for span in done.versions] == [10, 11, 12, 13] for done in found)
    engine.close()


def test_what_a_server_draws_under_other_weights_is_dropped(site: Site, models: list[Any], tmp_path: Path) -> None:
    """Nobody can know which server it was; so each is asked, and proves the policy's weights again."""
    told: list[str] = []
    engine = site.engine(tmp_path, told)
    engine.activate(Weights(10, models[2]))
    until(lambda: both_serve(engine), "both have the weights")
    site.owner.activate(Weights(site.owner.policy_version + 1, make_model(77)))
    asked = [request(5, salt=i) for i in range(12)]
    check(asked, results(engine.submit(asked), 300), {10: models[2]}, 12)
    assert any("which it did not get from here" in text for text in told), told
    engine.close()


def test_a_request_that_is_closed_is_aborted_at_its_server(site: Site, models: list[Any], tmp_path: Path) -> None:
    engine = site.engine(tmp_path)
    engine.activate(Weights(10, models[0]))
    site.slowly(0.05)
    try:
        futures = engine.submit([request(5, salt=i, max_new_tokens=200) for i in range(4)])
        time.sleep(2)
        engine.close()
        for done in results(futures):
            assert done.finish_reason == "abort"
            assert 0 < len(done.tokens) < 200
    finally:
        site.slowly(None)


def test_a_server_that_dies_behind_it_and_a_router_that_dies(site: Site, models: list[Any], tmp_path: Path) -> None:
    told: list[str] = []
    engine = site.engine(tmp_path, told, health_timeout_s=20.0, start_timeout_s=30.0)
    engine.activate(Weights(10, models[3]))
    until(lambda: both_serve(engine), "both have the weights")
    site.slowly(0.02)
    asked = [request(5, salt=i, max_new_tokens=100) for i in range(8)]
    futures = engine.submit(asked)
    time.sleep(1)
    process = site.places[0].process
    assert process is not None
    process.guard.kill()
    check(asked, results(futures, 300), {10: models[3]}, 100)
    site.router.kill()
    with pytest.raises(RunFailedError, match=r"got no answer \d+ times, the last time: http://127.0.0.1:\d+/generate"):
        results(engine.submit([request(5)]), 300)
    engine.close()
    with pytest.raises(EngineError, match=r"the router at http://127.0.0.1:\d+ does not answer, for 1 s"):
        site.urls.pop(0)
        site.engine(tmp_path / "again", start_timeout_s=1.0)
