"""The servers of one engine: started or attached to, kept alive, kept on the policy's weights, and chosen for requests.

    starting ──> ready ──(weights proven)──> serving ──(ended, hangs, refused an update)──> lost ──> starting …

Owns the life of each server. Never: requests and their responses. Invariant: :meth:`Fleet.choose` gives a server only
while that has proven the version in use; whatever was asked of a server before it was lost, or before an update of it
failed, is recognised by its ``epoch``, and is not used. Servers do not wait for each other: one that hangs while its
weights change has ``update_timeout_s``, and costs the others ``health_timeout_s`` once. All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from milesbatch.engines.protocol import PolicyWeights
from milesbatch.engines.sglang.client import ServerClient, ServerGoneError, ServerRefusedError
from milesbatch.engines.sglang.server import FleetOptions, Server, State
from milesbatch.engines.sglang.serving import ServerPlace
from milesbatch.engines.sglang.weights import Prover, SupersededError, Way, change
from milesbatch.errors import EngineError, InputError, MilesbatchError, StorageError

_LOOK_S = 0.25
_MOST_FAILURES = 3
"""Failures in a row to come to serving, after which a server is given up: when all are, the engine has failed; until
then it is tried again after growing pauses. One that serves and dies again is started again: the requests that it keeps
losing end that."""
_BACK_OFF_S = 1.0
_AGAIN_S = 60.0
_MOST_AGAIN_S = 1800.0
_FIRST_WORD_S = 30.0
"""After which a start is told to go on still."""
_MOST_STICKY = 4096
_MOST_WORDS = 300
_END_S = 3.0
"""Within which a server that has died is seen to: its guard ends what it left first."""
_HEALTH_S = 10.0
_TICK_S = 5.0


class Fleet:
    """All servers of one engine."""

    def __init__(self, places: Sequence[ServerPlace], way: Way, prover: Prover, options: FleetOptions) -> None:
        self.servers = [Server(place) for place in places]
        self._way, self._prover, self._options = way, prover, options
        self._weights: PolicyWeights | None = None
        self._activation = 0
        """Counts the weights that were to be used."""
        self._changing: set[asyncio.Task[float]] = set()
        self._change = asyncio.Event()
        self._lost = asyncio.Event()
        self._sticky: OrderedDict[Hashable, Server] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        """For servers with other weights, which all who suspect one share."""
        self.failure: MilesbatchError | None = None
        """Why no server will come any more."""

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(server)) for server in self.servers]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for a server whose keeper died of something unforeseen."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failure = (
                error if isinstance(error, MilesbatchError) else EngineError(f"{type(error).__name__}: {error}")
            )
            self._tell_change()

    async def await_one(self) -> None:
        """Until a server is there.

        Raises:
            EngineError: none will come any more; says why.
        """
        await self._await_any("ready", "serving")

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._changing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._let_go(server, is_over=True) for server in self.servers))

    # -- for requests -------------------------------------------------------------------------------------------------

    async def choose(self, key: Hashable) -> tuple[Server, ServerClient]:
        """The server that has the beginning of this request in its cache, else the one with the fewest requests; waits
        for one.

        Raises:
            EngineError: there will be none.
        """
        while True:
            serving = [server for server in self.servers if server.state == "serving" and server.client is not None]
            serving = [server for server in serving if not server.is_late] or serving
            if serving:
                server = self._sticky.get(key)
                if server not in serving:
                    server = min(serving, key=lambda one: one.in_flight)
                self._sticky[key] = server
                self._sticky.move_to_end(key)
                if len(self._sticky) > _MOST_STICKY:
                    self._sticky.popitem(last=False)
                assert server.client is not None
                return server, server.client
            self._check()
            await self._await_change()

    async def doubt(self, server: Server) -> None:
        """An answer did not come: ask the server itself whether it still generates; if not, it is lost."""
        client, changes = server.client, server.changes
        if server.state != "serving" or client is None or server.is_changing:
            return
        if server.doubt is None or server.doubt.done():
            server.doubt = asyncio.create_task(client.is_healthy(self._options.health_timeout_s))
        is_healthy = await asyncio.shield(server.doubt)
        # While weights change it is paused, and says no.
        if not is_healthy and server.state == "serving" and server.client is client and server.changes == changes:
            server.state = "lost"
            server.trouble = EngineError(f"{server.name} does not generate any more")

    async def await_serving(self) -> None:
        """Until one of the servers serves.

        Raises:
            EngineError: none will.
        """
        await self._await_any("serving")

    async def await_loss(self) -> None:
        """Until one of the servers that had weights is lost: what it was asked through a router is never answered."""
        await self._lost.wait()

    async def doubt_all(self) -> None:
        """As :meth:`doubt`, of an answer that any of them may have owed."""
        await asyncio.gather(*(self.doubt(server) for server in self.servers))

    async def suspect_all(self) -> None:
        """One of them drew under weights that it has not proven here: each is asked what it calls its weights, and must prove
        the policy's again where these are others."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_others())
        await asyncio.shield(self._looking)

    async def _look_for_others(self) -> None:
        await asyncio.gather(*(self._suspect(server) for server in self.servers))

    async def _suspect(self, server: Server) -> None:
        client, changes = server.client, server.changes
        if server.state != "serving" or client is None or server.is_changing:
            return
        try:
            found = (await client.get("model_info", self._options.health_timeout_s)).get("weight_version")
        except EngineError:
            return  # its health says more
        is_still = server.state == "serving" and server.client is client and server.changes == changes
        if is_still and found != server.weights_name:
            server.state = "lost"
            server.trouble = EngineError(f"{server.name} has weights {found!r}, which it did not get from here")

    # -- weights ------------------------------------------------------------------------------------------------------

    async def activate(self, weights: PolicyWeights) -> float:
        """Make ``weights`` those of all servers; those that fail are lost, and started again. Seconds of the longest
        pause.

        Returns when all of them serve the weights or have failed; those that need longer than ``health_timeout_s`` are
        not waited for, when at least one serves them.

        Raises:
            EngineError: no server will come any more.
        """
        self._weights = weights
        self._activation += 1
        able = [server for server in self.servers if server.state in ("ready", "serving")]
        tasks = [asyncio.create_task(self._catch_up(server)) for server in able]
        for task in tasks:
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)
            task.add_done_callback(self._ended)
        if tasks:
            await asyncio.wait(tasks, timeout=self._options.health_timeout_s)
        for server, task in zip(able, tasks, strict=True):
            server.is_late = not task.done()
        self._check()
        while not any(server.state == "serving" and server.version == weights.version for server in self.servers):
            self._check()
            await self._await_change()
        return max((task.result() for task in tasks if task.done()), default=0.0)

    async def _catch_up(self, server: Server) -> float:
        """To the newest weights, unless it has proven them already. The seconds of its pause; 0 when it failed: then it
        has a trouble, and is not used."""
        async with server.turn:
            client, weights, activation = server.client, self._weights, self._activation
            if client is None or weights is None or server.trouble is not None or server.activation == activation:
                return 0.0
            server.is_changing = True
            server.changes += 1
            name = self._prover.new_name(weights.version)

            def taint() -> None:
                server.epoch += 1
                if server.client is client:  # else it is lost already
                    server.state = "ready"

            ticking = asyncio.create_task(self._tick(server, weights.version))
            try:
                async with asyncio.timeout(self._options.update_timeout_s):
                    paused_s = await change(
                        client,
                        weights,
                        self._way,
                        self._prover,
                        name,
                        pause=self._options.pause,
                        limit_s=self._options.update_timeout_s,
                        on_failure=taint,
                    )
            except SupersededError:
                return 0.0  # the next activation, which is near, takes this server along
            except (EngineError, TimeoutError) as error:
                taint()
                if server.client is client:
                    server.trouble = EngineError(_why_not_taken(server, weights.version, error, self._options))
                return 0.0
            finally:
                server.is_changing = server.is_late = False
                ticking.cancel()
            if server.client is not client:
                return 0.0
            server.version, server.activation, server.failures = weights.version, activation, 0
            server.weights_name, server.why = name, ""
            # With older weights than those in use it waits for its next turn.
            server.state = "serving" if activation == self._activation else "ready"
            self._tell_change()
            return paused_s

    async def _tick(self, server: Server, version: int) -> None:
        """While weights change, which has a time limit of its own, nothing else shows that all is well; from when on it
        takes long, that is told."""
        began_s, word_s = time.monotonic(), self._options.health_timeout_s
        while True:
            self._options.listener.sign()
            await asyncio.sleep(min(_TICK_S, word_s))
            since_s = time.monotonic() - began_s
            if since_s >= word_s:
                word_s *= 2
                self._options.listener.tell(
                    f"{server.name} has been changing its weights to policy version {version} for {since_s:.0f} s; after"
                    f" {self._options.update_timeout_s:.0f} s (update_timeout_s) it is lost"
                )

    # -- the life of a server -----------------------------------------------------------------------------------------

    async def _keep(self, server: Server) -> None:
        while True:
            try:
                await self._bring_up(server)
                await self._watch(server)
            except (EngineError, InputError, StorageError) as error:
                if isinstance(error, StorageError) or (isinstance(error, InputError) and not server.was_up):
                    await self._let_go(server)
                    server.state, self.failure = "given up", error
                    self._tell_change()
                    return
                server.failures += 1
                told = error.what if error.what.startswith(server.name) else f"{server.name}: {error.what}"
                server.why = " ".join(told.split())[:_MOST_WORDS]
                await self._let_go(server)
                self._options.listener.tell(told)
                if server.failures < _MOST_FAILURES:
                    await asyncio.sleep(_BACK_OFF_S * server.failures)
                    continue
                server.state = "given up"
                if all(other.state == "given up" for other in self.servers):
                    self.failure = error
                self._tell_change()
                if self.failure is not None:
                    self._options.listener.tell(f"{server.name} is given up, as all others are")
                    return
                pause_s = min(_AGAIN_S * 2.0 ** (server.failures - _MOST_FAILURES), _MOST_AGAIN_S)
                self._options.listener.tell(
                    f"{server.name} is given up for {pause_s:.0f} s after {server.failures} failures in a row; other servers"
                    " have its requests"
                )
                await asyncio.sleep(pause_s)

    async def _bring_up(self, server: Server) -> None:
        """Until it serves the version in use, or waits for the first.

        Raises:
            EngineError: it cannot be brought up; says why. InputError: it is not such a one as this run needs.
        """
        server.state, server.trouble = "starting", None
        self._tell_change()
        began_s = time.monotonic()
        async with self._telling_of_start(server):
            server.client = await server.place.open(self._options.start_timeout_s, self._options.listener.sign)
        server.info = await server.client.get("server_info", self._options.health_timeout_s)
        if self._options.needed is not None:
            model = await server.client.get("model_info", self._options.health_timeout_s)
            self._options.needed.check(server.name, server.info, model)
        self._options.listener.tell(f"{server.name} is up after {time.monotonic() - began_s:.0f} s")
        server.state, server.was_up = "ready", True
        if self._weights is None:  # being up is all that can be asked of it
            server.why = ""
        await self._catch_up(server)
        self._tell_change()

    @asynccontextmanager
    async def _telling_of_start(self, server: Server) -> AsyncIterator[None]:
        """A start takes minutes, in which nothing else is said."""

        async def tell_now_and_then() -> None:
            word_s = _FIRST_WORD_S
            while True:
                await asyncio.sleep(word_s)
                word_s *= 2
                self._options.listener.tell(
                    f"{server.name} {words.still} for {time.monotonic() - began_s:.0f} s (of at most"
                    f" {self._options.start_timeout_s:.0f})"
                )

        began_s, words = time.monotonic(), server.place.coming
        self._options.listener.tell(f"{server.name} {words.now}")
        telling = asyncio.create_task(tell_now_and_then())
        try:
            yield
        finally:
            telling.cancel()

    async def _watch(self, server: Server) -> None:
        """While it is well.

        Raises:
            EngineError: it is not, any more.
        """
        assert server.client is not None
        period_s = min(_HEALTH_S, self._options.health_timeout_s / 3)
        good_s = asked_s = time.monotonic()
        asking: asyncio.Task[bool] | None = None
        try:
            while True:
                server.place.check()
                if server.trouble is not None:
                    await _look_for_end(server)
                    raise server.trouble
                now_s = time.monotonic()
                if server.is_changing:  # it is paused, not dead; an update has a time limit of its own
                    good_s = now_s
                if asking is not None and asking.done():
                    if asking.result():
                        good_s = now_s
                        self._options.listener.sign()
                    asking = None
                if asking is None and now_s - asked_s >= period_s and not server.is_changing:
                    asked_s = now_s
                    asking = asyncio.create_task(server.client.is_healthy(self._options.health_timeout_s))
                if now_s - good_s > self._options.health_timeout_s + period_s:
                    raise EngineError(
                        f"{server.name} has generated nothing for {now_s - good_s:.0f} s, though asked to"
                    )
                await asyncio.sleep(_LOOK_S)
        finally:
            if asking is not None:
                asking.cancel()

    async def _let_go(self, server: Server, *, is_over: bool = False) -> None:
        """End its processes; answers of it that are still to come are worth nothing."""
        if server.version >= 0:
            self._lost.set()
            self._lost = asyncio.Event()
        server.state, server.version, server.activation = "lost", -1, 0
        server.epoch += 1
        client, server.client = server.client, None
        self._tell_change()
        await asyncio.to_thread(server.place.leave, is_over=is_over)
        async with server.turn:  # a change of its weights ends with its connections
            if client is not None:
                self._way.forget(client)
                await client.close()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _tell_change(self) -> None:
        self._options.listener.show("; ".join(filter(None, (server.condition() for server in self.servers))))
        self._change.set()
        self._change = asyncio.Event()

    async def _await_any(self, *states: State) -> None:
        while not any(server.state in states for server in self.servers):
            self._check()
            await self._await_change()

    async def _await_change(self) -> None:
        await self._change.wait()


async def _look_for_end(server: Server) -> None:
    """What died is missed by those that ask it before its process is seen to have ended, which tells the cause.

    Raises:
        EngineError: it has ended; says how.
    """
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        server.place.check()
        await asyncio.sleep(_LOOK_S)


def _why_not_taken(server: Server, version: int, error: Exception, options: FleetOptions) -> str:
    why = f"not within {options.update_timeout_s:.0f} s (update_timeout_s)"
    if isinstance(error, EngineError):
        why = error.what
    return f"{server.name} did not take policy version {version}: {why}"


__all__ = ["Fleet", "FleetOptions", "Server", "ServerGoneError", "ServerRefusedError"]
