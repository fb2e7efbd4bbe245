"""The controller's HTTP server: routes to the hub, refuses other incarnations. Runs in the controller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from milesbatch.controller.hub import Hub
from milesbatch.wire import messages as wire

M = TypeVar("M", bound=wire.Message)
Handler = Callable[[Request], Awaitable[Response]]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the controller's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ControllerServer:
    """Serves the hub on a free port, for others under ``address``; ``url`` is known before the first request."""

    def __init__(
        self, hub: Hub, token: str, incarnation: int, address: str, progress: Callable[[wire.Message], None]
    ) -> None:
        self._hub = hub
        self._expected = (token, str(incarnation))
        self._progress = progress
        # Other nodes may know this one by an address that is none of its own (a name, a bridge): listen on all then.
        self._socket = socket.create_server((address if address == "127.0.0.1" else "", 0))
        self.url = f"http://{address}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,  # longer than the pauses between heartbeats: a new connection costs more than a beat
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    def _application(self) -> Starlette:
        hub = self._hub

        async def heartbeat(message: wire.Heartbeat) -> wire.Message:
            return hub.heartbeat(message)

        async def commit(message: wire.CommitRequest) -> wire.Message:
            return hub.commit(message)

        async def pending(message: wire.PendingRequest) -> wire.Message:
            return wire.PendingAnswer(groups=tuple(hub.ready[group_id] for group_id in sorted(hub.ready)))

        async def recorded(message: wire.Recorded) -> wire.Message:
            hub.recorded(message)
            return self._told(message)

        async def published(message: wire.Published) -> wire.Message:
            hub.publish(message)
            return self._told(message)

        async def to_publish_again(message: wire.UnreachableRequest) -> wire.Message:
            return hub.to_publish_again()

        async def step_done(message: wire.StepDone) -> wire.Message:
            hub.step_s = message.metrics.get("train_s", 0.0) + message.metrics.get("publish_s", 0.0)
            return self._told(message)

        async def checkpointed(message: wire.Checkpointed) -> wire.Message:
            hub.save_s = message.seconds
            self._told(message)
            return wire.CheckpointedAnswer(oldest_held=hub.oldest_held())

        async def finished(message: wire.Finished) -> wire.Message:
            hub.finish()
            return self._told(message)

        async def broadcast_members(message: wire.BroadcastMembersRequest) -> wire.Message:
            return hub.broadcast_members(message)

        async def broadcast_begin(message: wire.BroadcastBegin) -> wire.Message:
            return hub.broadcasts.begin(message)

        async def broadcast_end(message: wire.BroadcastEnd) -> wire.Message:
            hub.broadcasts.end(message)
            return wire.Ok()

        async def broadcast_question(message: wire.BroadcastQuestion) -> wire.Message:
            return hub.broadcasts.question(message)

        return Starlette(
            routes=[
                self._route("heartbeat", wire.Heartbeat, heartbeat),
                self._route("lease", wire.LeaseRequest, hub.lease),
                self._route("commit", wire.CommitRequest, commit),
                self._route("batch", wire.BatchRequest, hub.batch),
                self._route("pending", wire.PendingRequest, pending),
                self._route("recorded", wire.Recorded, recorded),
                self._route("published", wire.Published, published),
                self._route("step", wire.StepDone, step_done),
                self._route("checkpointed", wire.Checkpointed, checkpointed),
                self._route("finished", wire.Finished, finished),
                self._route("regenerate", wire.RegenerateRequest, hub.regenerate),
                self._route("unreachable", wire.Unreachable, hub.report_unreachable),
                self._route("to-publish-again", wire.UnreachableRequest, to_publish_again),
                self._route("rendezvous", wire.Rendezvous, hub.rendezvous),
                self._route("broadcast-poll", wire.BroadcastPoll, hub.broadcasts.poll),
                self._route("broadcast-members", wire.BroadcastMembersRequest, broadcast_members),
                self._route("broadcast-begin", wire.BroadcastBegin, broadcast_begin),
                self._route("broadcast-end", wire.BroadcastEnd, broadcast_end),
                self._route("broadcast-question", wire.BroadcastQuestion, broadcast_question),
                Route("/v1/status", self._status, methods=["GET"]),
            ]
        )

    def _told(self, message: wire.Message) -> wire.Ok:
        self._progress(message)
        return wire.Ok()

    def _route(self, name: str, kind: type[M], answer: Callable[[M], Awaitable[wire.Message]]) -> Route:
        hub = self._hub

        async def endpoint(request: Request) -> Response:
            headers = request.headers
            if (headers.get("x-milesbatch-token"), headers.get("x-milesbatch-incarnation")) != self._expected:
                return JSONResponse({"error": "another incarnation"}, status_code=409)
            if not hub.is_current(headers.get("x-milesbatch-process", "")):
                return JSONResponse({"error": "replaced"}, status_code=409)
            try:
                message = kind.model_validate_json(await request.body())
            except ValidationError as error:
                return JSONResponse({"error": str(error)}, status_code=422)
            return Response((await answer(message)).model_dump_json(), media_type="application/json")

        return Route(f"/v1/{name}", endpoint, methods=["POST"])

    async def _status(self, request: Request) -> Response:
        return Response(self._hub.status().model_dump_json(), media_type="application/json")
