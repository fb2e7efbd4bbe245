"""The lives of servers, against small HTTP servers that answer control calls as SGLang does, until they are told to hang or
fail. What real servers do is in ``tests/contract/engines``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from milesbatch.engines.sglang import fleet as fleet_module
from milesbatch.engines.sglang.client import ServerClient, ServerGoneError
from milesbatch.engines.sglang.fleet import Fleet, FleetOptions
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.engines.sglang.server import Server, State
from milesbatch.engines.sglang.serving import Coming
from milesbatch.engines.sglang.weights import Prover
from milesbatch.errors import EngineError, InputError

UPDATE_S = 3.0


@dataclass
class Weights:
    version: int
    weights_digest: str = "xxh128:" + "0" * 32

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def write_model(self, directory: Path) -> None:
        raise AssertionError("not asked for")


class ByPost:
    """Tells a server what its weights are called, and nothing else (satisfies ``Way``)."""

    async def load(self, client: ServerClient, weights: Any, name: str, *, keep_cache: bool, limit_s: float) -> None:
        await client.post("load", {"version": name}, limit_s)

    def forget(self, client: ServerClient) -> None:
        """There is nothing."""


@dataclass
class Place:
    """One server in this process; each ``open`` starts it anew (satisfies ``ServerPlace``)."""

    name: str
    coming = Coming("is starting", "has been starting", "it is starting again")
    version: str = ""
    hangs: bool = False
    """While it loads; a new start does not."""
    dies: bool = False
    """When asked to load: the connection first, and what others see of its process a moment later."""
    strangers: int = 0
    """Starts at which something else answers there."""
    broken_starts: int = 0
    starts: int = 0
    start_s: float = 0.0
    gone: bool = False
    runner: web.AppRunner | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def open(self, timeout_s: float, sign: Callable[[], None]) -> ServerClient:
        self.starts += 1
        await asyncio.sleep(self.start_s)
        if self.strangers > 0:
            self.strangers -= 1
            raise InputError(f"{self.name} is no server")
        if self.broken_starts > 0:
            self.broken_starts -= 1
            raise EngineError(f"{self.name} ended at its start")
        self.version, self.gone = "", False
        app = web.Application()
        app.router.add_route("*", "/{path}", self._answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return ServerClient(f"http://127.0.0.1:{self.runner.addresses[0][1]}")

    async def _answer(self, request: web.Request) -> web.Response:
        path, answer = request.match_info["path"], dict[str, Any]()
        if path == "load":
            if self.dies:
                self.dies = False
                self.loop.call_later(0.6, lambda: setattr(self, "gone", True))
                assert request.transport is not None
                request.transport.abort()
            if self.hangs:
                await asyncio.sleep(600)
            self.version = (await request.json())["version"]
        if path == "model_info":
            answer = {"weight_version": self.version}
        if path == "weights_checker":
            answer = {"ranks": [{"checksums": {"w": "ab" * 32}}]}
        return web.json_response(answer)

    def check(self) -> None:
        if self.gone:
            raise EngineError(f"{self.name} ended")

    def leave(self, *, is_over: bool = False) -> None:
        self.hangs = False
        runner, self.runner = self.runner, None
        if runner is not None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self.loop).result(10)


def make_fleet(
    places: list[Place], told: list[str], health_timeout_s: float = 0.5, shown: list[str] | None = None
) -> Fleet:
    options = FleetOptions(
        pause="retract",
        start_timeout_s=30.0,
        health_timeout_s=health_timeout_s,
        request_timeout_s=1800.0,
        update_timeout_s=UPDATE_S,
        listener=FleetListener(told.append, ([] if shown is None else shown).append),
    )
    return Fleet(places, ByPost(), Prover(can_expect=False), options)


async def two_that_are_up() -> tuple[Fleet, list[Place]]:
    places = [Place("one"), Place("two")]
    fleet = make_fleet(places, told=[])
    fleet.start()
    await until(lambda: all(server.state == "ready" for server in fleet.servers), "all are up")
    return fleet, places


async def until(look: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not look():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited until {what}") from None


def all_serve(fleet: Fleet, version: int) -> bool:
    return all((server.state, server.version) == ("serving", version) for server in fleet.servers)


def test_a_server_that_hangs_while_its_weights_change_is_told_lost_and_started_again() -> None:
    async def scenario() -> None:
        told: list[str] = []
        places = [Place("one"), Place("two"), Place("three")]
        fleet = make_fleet(places, told)
        fleet.start()
        await fleet.await_one()
        await until(lambda: all(server.state == "ready" for server in fleet.servers), "all are up")
        await fleet.activate(Weights(1))
        places[0].hangs = True
        async with asyncio.timeout(UPDATE_S - 1):
            await fleet.activate(Weights(2))
        assert [server.version for server in fleet.servers] == [1, 2, 2]
        for key in range(6):
            server, _ = await fleet.choose(key)
            assert server.name != "one", "requests do not go to the one that hangs"
        changing = "one has been changing its weights to policy version 2 for"
        await until(lambda: any(changing in text for text in told), "it is told")
        places[1].gone = True
        await until(lambda: places[1].starts == 2 and fleet.servers[1].version == 2, "another has caught up meanwhile")
        assert places[0].starts == 1, "while the first still hangs"
        await until(lambda: all_serve(fleet, 2), "it was started again, and has caught up")
        assert places[0].starts == 2
        (why,) = [text for text in told if text.startswith("one did not take")]
        assert "did not take policy version 2: " in why and f"{UPDATE_S:.0f} s" in why
        await fleet.close()

    asyncio.run(scenario())


def test_a_server_that_was_changing_too_long_when_the_next_weights_came_gets_those() -> None:
    async def scenario() -> None:
        fleet, places = await two_that_are_up()
        places[0].hangs = True
        await fleet.activate(Weights(1))
        await fleet.activate(Weights(2))
        assert [server.version for server in fleet.servers] == [-1, 2]
        await until(lambda: all_serve(fleet, 2), "it was started again, with the newest")
        await fleet.close()

    asyncio.run(scenario())


def test_a_server_that_dies_while_its_weights_change_is_not_taken_for_one_that_is_there() -> None:
    async def scenario() -> None:
        fleet, places = await two_that_are_up()
        places[0].hangs = True
        await fleet.activate(Weights(1))
        places[0].gone = True
        places[0].start_s = 1.0
        await until(lambda: places[0].starts == 2, "it is started again")
        assert fleet.servers[0].state == "starting" and fleet.servers[0].client is None
        await fleet.activate(Weights(2))
        await until(lambda: all_serve(fleet, 2), "it has caught up")
        await fleet.close()

    asyncio.run(scenario())


def test_a_server_that_is_given_up_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.01)
    monkeypatch.setattr(fleet_module, "_AGAIN_S", 0.2)

    async def scenario() -> None:
        told: list[str] = []
        places = [Place("one", broken_starts=4), Place("two")]
        fleet = make_fleet(places, told)
        fleet.start()
        await fleet.await_one()
        await fleet.activate(Weights(1))
        await until(lambda: all_serve(fleet, 1), "it serves")
        assert places[0].starts == 5
        given_up = [text for text in told if "is given up for" in text]
        assert [text.split(" after ")[1].split(";")[0] for text in given_up] == [
            "3 failures in a row",
            "4 failures in a row",
        ]
        await fleet.close()

    asyncio.run(scenario())


def test_when_all_are_given_up_the_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.01)
    monkeypatch.setattr(fleet_module, "_AGAIN_S", 0.1)

    async def scenario() -> None:
        told: list[str] = []
        fleet = make_fleet([Place("one", broken_starts=99), Place("two", broken_starts=99)], told)
        fleet.start()
        with pytest.raises(EngineError, match="ended at its start"):
            await fleet.await_one()
        assert told[-1].endswith("is given up, as all others are")
        await fleet.close()

    asyncio.run(scenario())


def test_a_start_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_FIRST_WORD_S", 0.1)

    async def scenario() -> None:
        told: list[str] = []
        fleet = make_fleet([Place("one", start_s=1.0)], told)
        fleet.start()
        await fleet.await_one()
        assert told[0] == "one is starting"
        assert 2 <= sum("one has been starting for" in text for text in told) <= 4, "ever more rarely"
        assert "is up after" in told[-1]
        await fleet.close()

    asyncio.run(scenario())


def test_a_death_that_others_notice_first_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed is a lost connection to whoever asks it, before its process is seen to have ended."""
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.01)

    async def scenario() -> None:
        told: list[str] = []
        place = Place("one", dies=True)
        fleet = make_fleet([place], told)
        fleet.start()
        await fleet.await_one()
        await fleet.activate(Weights(1))
        assert place.starts == 2
        assert "one ended" in told, told
        assert not any("did not take" in text for text in told), told
        await fleet.close()

    asyncio.run(scenario())


def test_what_keeps_servers_from_working_is_shown_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.01)

    async def scenario() -> None:
        shown: list[str] = []
        places = [Place("one", start_s=0.3), Place("two", broken_starts=1)]
        fleet = make_fleet(places, [], shown=shown)
        fleet.start()
        await until(lambda: bool(shown) and shown[-1] == "", "all are up")
        seen = list(dict.fromkeys(shown))
        assert "one is starting; two is starting" in seen
        assert "one is starting; two ended at its start; it is starting again" in seen
        await fleet.activate(Weights(1))
        assert shown[-1] == ""
        places[1].gone = True
        await until(lambda: "two ended; it is starting again" in shown, "its end is shown")
        await until(lambda: shown[-1] == "", "and that it is over")
        await fleet.close()

    asyncio.run(scenario())


def test_of_servers_that_are_suspected_those_with_other_weights_prove_them_again() -> None:
    async def scenario() -> None:
        told: list[str] = []
        places = [Place("one"), Place("two")]
        fleet = make_fleet(places, told)
        fleet.start()
        await until(lambda: all(server.state == "ready" for server in fleet.servers), "all are up")
        await fleet.activate(Weights(1))
        await fleet.await_serving()
        await fleet.suspect_all()
        assert all_serve(fleet, 1), "both have what they got"
        places[0].version = "of-another-engine.1.1"
        await asyncio.gather(*(fleet.suspect_all() for _ in range(5)))
        assert [server.state for server in fleet.servers] == ["lost", "serving"]
        await until(lambda: all_serve(fleet, 1), "it has proven them again")
        assert [place.starts for place in places] == [2, 1]
        assert sum("which it did not get from here" in text for text in told) == 1
        await fleet.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("state", "why", "condition"),
    [
        ("starting", "", "one is starting"),
        ("starting", "one ended", "one ended; it is starting again"),
        ("ready", "", ""),
        ("ready", "one did not take policy version 3", "one did not take policy version 3; it is tried again"),
        ("lost", "one ended", "one ended"),
        ("given up", "one ended", "one ended; it is given up for now"),
        ("serving", "", ""),
    ],
)
def test_one_works_when_it_has_proven_weights_since_its_last_failure(state: State, why: str, condition: str) -> None:
    async def scenario() -> None:
        assert Server(Place("one"), state, why=why).condition() == condition

    asyncio.run(scenario())


def test_what_answers_in_a_lost_servers_place_costs_that_server_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_BACK_OFF_S", 0.01)
    monkeypatch.setattr(fleet_module, "_AGAIN_S", 0.2)

    async def scenario() -> None:
        fleet, places = await two_that_are_up()
        await fleet.activate(Weights(1))
        losing = asyncio.create_task(fleet.await_loss())
        places[0].strangers = 4
        places[0].gone = True
        await until(lambda: fleet.servers[0].state == "given up", "it is given up for now")
        assert fleet.failure is None and losing.done()
        server, _ = await fleet.choose("any")
        assert server.name == "two"
        await until(lambda: all_serve(fleet, 1), "it came back")
        await fleet.close()
        stranger = Place("three", strangers=99)
        fleet = make_fleet([stranger], [])
        fleet.start()
        with pytest.raises(InputError, match="is no server"):
            await fleet.await_one()
        assert stranger.starts == 1, "at first it is a slip of the hand"
        await fleet.close()

    asyncio.run(scenario())


def test_a_client_that_was_let_go_of_says_so() -> None:
    async def scenario() -> None:
        client = ServerClient("http://127.0.0.1:9")
        with pytest.raises(ServerGoneError):
            await client.get("x", 1.0)
        await client.close()
        with pytest.raises(ServerGoneError, match="was let go of"):
            await client.get("x", 1.0)

    asyncio.run(scenario())
