"""A real S3 server on this machine (moto), with a wire in front of it that can break.

moto checks a condition and then writes, in two steps and many threads; S3 does both at once. A lock around its application
gives the atomicity that S3 documents. Everything else that goes wrong here is asked for by a test.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

Environ = dict[str, Any]


class Quiet(WSGIRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a connection that was reset on purpose
            super().handle()

    def log(self, type: str, message: str, *args: Any) -> None:
        """Says nothing."""

    def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
        """Is what the tests want."""


@dataclass
class Trouble:
    """What happens to requests that ``matches``, ``times`` times; ``fired`` counts."""

    matches: Callable[[Environ], bool]
    action: str
    """What happens (``cut``, ``reset``, ``silent`` or a status) and when (``_before`` or ``_after`` it is done)."""
    times: int
    fired: int = 0


@dataclass
class Wire:
    """The WSGI application: records requests, breaks some, passes the rest on to moto one at a time."""

    application: Callable[..., Any]
    troubles: list[Trouble] = field(default_factory=list)
    ignored: Callable[[Environ], bool] = lambda environ: False
    """Requests whose If-None-Match is taken away: a server that does not know it."""
    requests: list[str] = field(default_factory=list)
    """``METHOD path?query`` in the order of arrival."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Any:
        self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        action = self._trouble(environ)
        if self.ignored(environ):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        status, _, when = action.partition("_")
        if when == "before" and status in ("cut", "reset"):
            return self._cut(environ, start_response, status)
        if when == "before":
            start_response(f"{status} Trouble", [("Content-Length", "0")])
            return []
        with self._lock:
            kept: list[Any] = []
            body = b"".join(self.application(environ, lambda *answer: kept.append(answer)))
        if status == "silent":
            time.sleep(1.5)
        if status in ("cut", "reset", "silent"):
            return self._cut(environ, start_response, status)
        if when == "after":
            start_response(f"{status} Trouble", [("Content-Length", "0")])
            return []
        start_response(*kept[0])
        return [body]

    def _trouble(self, environ: Environ) -> str:
        for trouble in self.troubles:
            if trouble.fired < trouble.times and trouble.matches(environ):
                trouble.fired += 1
                return trouble.action
        return ""

    @staticmethod
    def _cut(environ: Environ, start_response: Callable[..., Any], how: str) -> list[bytes]:
        connection = environ["werkzeug.socket"]
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(connection.detach())  # what was not answered is answered by a reset
        else:
            connection.shutdown(socket.SHUT_RDWR)
        start_response("200 OK", [])
        raise BrokenPipeError

    @contextlib.contextmanager
    def trouble(self, action: str, matches: Callable[[Environ], bool], times: int = 1) -> Iterator[Trouble]:
        one = Trouble(matches, action, times)
        self.troubles.append(one)
        try:
            yield one
        finally:
            self.troubles.remove(one)


def is_probe(environ: Environ) -> bool:
    """A trial of the store's own, to find out what the server can do."""
    return ".tmp-condition" in environ["PATH_INFO"]


def is_complete(environ: Environ) -> bool:
    return environ["REQUEST_METHOD"] == "POST" and "uploadId=" in environ["QUERY_STRING"]


def is_commit(environ: Environ) -> bool:
    """A request that makes an object visible."""
    put = environ["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environ
    return (put or is_complete(environ)) and not is_probe(environ)


class Server:
    """The server, in a thread of this process."""

    def __init__(self) -> None:
        self.wire = Wire(DomainDispatcherApplication(create_backend_app))
        self._server: BaseWSGIServer = make_server("127.0.0.1", 0, self.wire, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port = self._server.server_port

    @property
    def client(self) -> dict[str, Any]:
        """Arguments for the client of an object store."""
        return {
            "key": "testing",
            "secret": "testing",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{self.port}", "region_name": "us-east-1"},
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
