"""The rollout engine over SGLang servers (satisfies ``RolloutEngine``): token ids in, token ids and logprobs out.

Owns the event loop in a thread, the futures, and the way of each request through servers that may die under it. Never:
starts processes itself (``serving.py``), or touches weights (``weights.py``). Invariant: a future ends with tokens that
servers drew under versions that were activated here, or with an error; a failure never shortens a response and never
invents one. The page behind it is ``docs/sglang.md``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from milesbatch.engines.protocol import Completion, FinishReason, GenerationRequest, PolicyWeights
from milesbatch.engines.request_check import check_requests
from milesbatch.engines.sglang.answer import ForeignWeightsError
from milesbatch.engines.sglang.client import ServerClient, ServerGoneError, ServerRefusedError
from milesbatch.engines.sglang.fleet import Fleet, FleetOptions, Server
from milesbatch.engines.sglang.response import Detokenizer, Response
from milesbatch.engines.sglang.router import Router
from milesbatch.engines.sglang.serving import ServerPlace
from milesbatch.engines.sglang.weights import Prover, Way
from milesbatch.errors import EngineError, MilesbatchError, RunFailedError

if TYPE_CHECKING:
    import torch

    InFiles = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

T = TypeVar("T")
_MOST_FAILURES = 6
"""Answers that one request may lack in a row, without a new token in between."""
_BACK_OFF_S = 0.25
_MOST_BACK_OFF_S = 8.0
_WORD_S = 30.0
"""Between words about answers that did not come through a router."""
_ABORT_S = 5.0
"""For the answers of aborted requests, which tell what was drawn."""
_CLOSE_S = 90.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What requests must keep to, and what answers look like."""

    max_length: int
    vocab_size: int
    routed: tuple[int, int] | None = None
    """Layers, and experts of a token in each: they are recorded. None: they are not."""


@dataclass(frozen=True, slots=True)
class _ServedWeights:
    """A policy version under the names that servers know (satisfies ``PolicyWeights``)."""

    weights: PolicyWeights
    named: Mapping[str, torch.Tensor]

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def weights_digest(self) -> str:
        return self.weights.weights_digest

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.named

    def write_model(self, directory: Path) -> None:
        self.weights.write_model(directory)


class SGLangEngine:
    """Requests spread over servers that follow one policy. See ``RolloutEngine`` for what each method promises."""

    def __init__(
        self,
        places: Sequence[ServerPlace],
        way: Way,
        prover: Prover,
        options: FleetOptions,
        limits: EngineLimits,
        stop_text: Detokenizer | None = None,
        in_files: InFiles | None = None,
        router: Router | None = None,
    ) -> None:
        """``in_files`` gives a policy version's tensors under the names that servers know, where those are others;
        ``router`` is in front of ``places``, where a site has one."""
        self._router = router
        self._in_files = in_files
        self._limits, self._options, self._stop_text = limits, options, stop_text
        self._nonce = secrets.token_hex(4)
        self._number = 0
        self._open: dict[Future[Completion], None] = {}
        self._responses: dict[asyncio.Task[None], Response] = {}
        self._in_flight: dict[str, Sequence[ServerClient]] = {}
        """Request id -> the servers that may have it."""
        self._prover = prover
        self._router_told_s = -_WORD_S
        self._version = -1
        self._activations = 0
        """Names the cache that new requests share: a prefix that older weights computed is not theirs, even when a version
        comes back."""
        self._tokens = 0
        self._cached = self._prompted = 0
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._fleet = self._call(_made(places, way, prover, options))

    # -- what a worker calls ------------------------------------------------------------------------------------------

    def await_server(self) -> None:
        """Until one of the servers is up, and the router where there is one; needs no weights.

        Raises:
            EngineError, InputError: none will come; says why.
        """
        self._call(self._fleet.await_one())
        if self._router is not None:
            urls = [server.name for server in self._fleet.servers]
            options = self._options
            self._call(self._router.await_up(urls, options.start_timeout_s, options.listener.tell))

    def activate(self, weights: PolicyWeights) -> float:
        """As ``RolloutEngine.activate``; servers that do not take the weights are started again, and catch up later.

        Raises:
            EngineError: no server can be brought to the version.
            MilesbatchError: the engine is closed.
        """
        self._check_open()
        if self._in_files is not None:
            weights = _ServedWeights(weights, self._in_files(weights.tensors()))
        paused_s = self._call(self._fleet.activate(weights))
        self._version = weights.version
        self._activations += 1
        return paused_s

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """As ``RolloutEngine.submit``. Draws do not follow ``seed``, unless the servers run deterministically.

        Raises:
            ValueError: a request cannot be generated (says which and why); none was queued.
            MilesbatchError: no weights are active yet, or the engine is closed.
        """
        check_requests(
            requests,
            max_length=self._limits.max_length,
            vocab_size=self._limits.vocab_size,
            has_detokenizer=self._stop_text is not None,
        )
        self._check_open()
        if self._version < 0:
            raise MilesbatchError(
                f"{len(requests)} requests were submitted before any weights are active", mend="call activate first"
            )
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._open.update((future, None) for future in futures)
        self._loop.call_soon_threadsafe(self._begin, list(zip(requests, futures, strict=True)))
        return futures

    @property
    def policy_version(self) -> int:
        """Version that the next token will be drawn under; -1 before the first ``activate``."""
        return self._version

    @property
    def samples_in_flight(self) -> int:
        """Requests queued or running."""
        return len(self._open)

    @property
    def tokens_generated(self) -> int:
        """Tokens of answers since the start. An answer comes as a whole: see ``FleetOptions.sign`` for life
        meanwhile."""
        return self._tokens

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens that servers had in their prefix caches; None before the first answer."""
        return self._cached / self._prompted if self._prompted else None

    def close(self) -> None:
        """Stop; futures still open end as ``abort`` with the tokens they have. No process of a server is left."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ABORT_S)

    def _check_open(self) -> None:
        if self._is_closing:
            raise MilesbatchError("the engine is closed", mend="make a new engine")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # whoever waited was interrupted
            raise

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _begin(self, pairs: Sequence[tuple[GenerationRequest, Future[Completion]]]) -> None:
        for request, future in pairs:
            if not future.set_running_or_notify_cancel():
                self._open.pop(future, None)
                continue
            response = Response(request, self._limits.vocab_size, self._limits.routed)
            task = self._loop.create_task(self._answer(response, future))
            self._responses[task] = response
            task.add_done_callback(partial(self._ended, future))

    def _ended(self, future: Future[Completion], task: asyncio.Task[None]) -> None:
        """Whatever it ended with, the one who waits for ``future`` hears of it."""
        self._responses.pop(task, None)
        self._open.pop(future, None)
        if not future.done():
            error = None if task.cancelled() else task.exception()
            future.set_exception(error or EngineError("a request was given up"))

    async def _answer(self, response: Response, future: Future[Completion]) -> None:
        """One request from its beginning to its end, over as many servers and answers as it takes."""
        try:
            completion = await self._generate(response)
        except asyncio.CancelledError:
            completion = response.completion("abort")
        except MilesbatchError as error:
            self._open.pop(future, None)
            future.set_exception(error)
            return
        self._open.pop(future, None)
        self._cached += response.cached_tokens
        self._prompted += response.prompt_tokens
        future.set_result(completion)

    async def _generate(self, response: Response) -> Completion:
        failures, since_s = 0, 0.0
        # A router learns later than the engine which servers are there; until then it may owe more answers.
        patience_s = 0.0 if self._router is None else self._options.start_timeout_s
        number, self._number = self._number, self._number + 1
        while not self._is_closing:
            before = len(response.tokens)
            try:
                reason = await self._one_answer(response, number)
            except ServerGoneError as error:
                since_s = since_s if failures else time.monotonic()
                failures += 1
                if failures >= _MOST_FAILURES and time.monotonic() - since_s >= patience_s:
                    raise RunFailedError(
                        f"a request got no answer {failures} times, the last time: {error.what}",
                        mend="read the servers' logs; the group is generated again by the next start of this worker",
                    ) from error
                await asyncio.sleep(min(_BACK_OFF_S * 2**failures, _MOST_BACK_OFF_S))
                continue
            except ServerRefusedError as error:
                raise RunFailedError(
                    f"a server refused a request that this engine takes: {error.what}",
                    mend="see whether rollout.sglang.arguments forbid what the recipe asks for",
                ) from error
            if reason is not None:
                return response.completion(reason)
            failures = 0 if len(response.tokens) > before else failures + 1
            if failures >= _MOST_FAILURES:
                raise RunFailedError(f"servers aborted a request {failures} times in a row, without a token")
        return response.completion("abort")

    async def _one_answer(self, response: Response, number: int) -> FinishReason | None:
        """Why the response has ended, or None."""
        # Servers abort by the beginning of an id: none may begin another.
        rid = f"{self._nonce}.{number:09d}.{len(response.tokens):07d}.{secrets.token_hex(2)}"
        try:
            if self._router is None:
                return await self._ask_server(response, rid)
            return await self._ask_router(self._router, response, rid)
        finally:
            self._in_flight.pop(rid, None)

    async def _ask_server(self, response: Response, rid: str) -> FinishReason | None:
        server, client = await self._fleet.choose(response.request.prompt_tokens)
        epoch = server.epoch
        body = self._body(response, rid, [server])
        self._in_flight[rid] = [client]
        server.in_flight += 1
        try:
            answer = await client.post("generate", body, self._options.request_timeout_s)
        except ServerGoneError:
            await self._fleet.doubt(server)
            raise
        finally:
            server.in_flight -= 1
        if server.epoch != epoch:
            raise ServerGoneError(f"{server.name} was lost, or failed to change its weights, while it answered")
        try:
            return self._take(response, answer)
        except ForeignWeightsError as error:
            if server.client is client and server.state == "serving" and not server.is_changing:
                # It must prove the policy's weights again before it is asked again.
                server.state, server.trouble = "lost", EngineError(f"{server.name}: {error.what}")
            raise

    async def _ask_router(self, router: Router, response: Response, rid: str) -> FinishReason | None:
        await self._fleet.await_serving()
        servers = self._fleet.servers
        self._in_flight[rid] = [server.client for server in servers if server.client is not None]
        try:
            answer = await self._routed(router, self._body(response, rid, servers))
        except ServerGoneError as error:
            if time.monotonic() - self._router_told_s >= _WORD_S:
                self._router_told_s = time.monotonic()
                self._options.listener.tell(f"through the router at {router.url} no answer came: {error.what}")
            await self._fleet.doubt_all()
            raise
        try:
            return self._take(response, answer)
        except ForeignWeightsError:
            await self._fleet.suspect_all()
            raise

    async def _routed(self, router: Router, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, unless a server is lost meanwhile, which may be the one that owes it."""
        generating = asyncio.ensure_future(router.generate(body, self._options.request_timeout_s))
        lost = asyncio.ensure_future(self._fleet.await_loss())
        try:
            await asyncio.wait({generating, lost}, return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                return generating.result()
            raise ServerGoneError("a server behind it was lost")
        finally:
            generating.cancel()
            lost.cancel()

    def _body(self, response: Response, rid: str, servers: Sequence[Server]) -> dict[str, Any]:
        """What ``servers``, any of which may answer, are asked."""
        is_deterministic = all(server.info.get("enable_deterministic_inference") for server in servers)
        seed = response.request.seed if is_deterministic else None
        return response.body(rid, f"{self._nonce}.{self._activations}", seed)

    def _take(self, response: Response, answer: dict[str, Any]) -> FinishReason | None:
        before = len(response.tokens)
        reason = response.add(answer, self._prover.versions, self._stop_text)
        self._tokens += max(len(response.tokens) - before, 0)
        return reason

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        running = list(self._responses)
        if running:
            asked = [(rid, client) for rid, clients in self._in_flight.items() for client in clients]
            await asyncio.gather(*(self._abort(rid, client) for rid, client in asked))
            await asyncio.wait(running, timeout=_ABORT_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for future in list(self._open):  # those that had not begun
            self._open.pop(future, None)
            if future.running() or future.set_running_or_notify_cancel():
                future.set_result(Completion((), (), "abort"))
        await self._fleet.close()
        if self._router is not None:
            await self._router.close()

    async def _abort(self, rid: str, client: ServerClient) -> None:
        with suppress(EngineError):
            await client.post("abort_request", {"rid": rid}, _ABORT_S)


async def _made(places: Sequence[ServerPlace], way: Way, prover: Prover, options: FleetOptions) -> Fleet:
    fleet = Fleet(places, way, prover, options)
    fleet.start()
    return fleet
