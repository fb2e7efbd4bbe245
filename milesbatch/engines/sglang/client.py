"""One server as its engine sees it: HTTP calls with a time limit each, and errors with names.

Owns the connections. Never: decides what a failure means for a request. Invariant: every call ends within its limit;
what may be repeated safely is up to the caller, who is told whether the server is gone (:class:`ServerGoneError`) or
has refused (:class:`ServerRefusedError`). Asking for the same tokens twice changes nothing at a server, so that
generating may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from milesbatch.errors import EngineError

_CONNECT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which a server closes a connection that is idle: none is used in the moment of its end."""
_WORDS = 300


class ServerGoneError(EngineError):
    """No answer, or one that says that the server itself has failed; another server, or a later try, may answer."""


class ServerRefusedError(EngineError):
    """The server does not do what was asked, and says why; asking again cannot help."""


class ServerLacksPathError(ServerRefusedError):
    """There is no such path: what answers is no server of SGLang, or a much older one."""


class ServerWantsKeyError(ServerRefusedError):
    """It wants to be shown a key, or another one."""


class ServerClient:
    """HTTP to one server. For one event loop."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, limit_s: float) -> dict[str, Any]:
        """The JSON object at ``path``; empty words are none.

        Raises:
            ServerGoneError, ServerRefusedError: as they say.
        """
        return self._object_of(path, await self._ask("GET", path, None, limit_s))

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send ``body`` and return the JSON object that comes back; an empty one where a call is answered in plain words.

        Raises:
            ServerGoneError, ServerRefusedError: as they say; the latter also when the answer says ``success: false``.
        """
        answer = self._object_of(path, await self._ask("POST", path, body, limit_s), words={})
        if answer.get("success") is False:
            raise ServerRefusedError(f"{self.url}/{path} failed: {answer.get('message', 'no reason given')}")
        return answer

    async def is_healthy(self, limit_s: float) -> bool:
        """Has it generated a token when asked, or for somebody else meanwhile? Not while it is paused."""
        try:
            await self._ask("GET", "health_generate", None, limit_s)  # whatever words it has for it
        except EngineError:
            return False
        return True

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> bytes:
        if self._session is None:  # made where the loop runs
            connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connections, headers=self._headers)
        if self._session.closed:
            raise ServerGoneError(f"{self.url} was let go of")
        data = None if body is None else json.dumps(body).encode()
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(_CONNECT_S, limit_s))
        try:
            async with self._session.request(method, f"{self.url}/{path}", data=data, timeout=timeout) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise ServerGoneError(f"{self.url}/{path} did not answer within {limit_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGoneError(f"{self.url}/{path} cannot be asked: {type(error).__name__} {error}") from error
        if status >= 400:
            raise _kind_of(status)(f"{self.url}/{path} answered {status}: {_words_of(content)}")
        return content

    def _object_of(self, path: str, content: bytes, words: dict[str, Any] | None = None) -> dict[str, Any]:
        """``words``: what stands for an answer that is no JSON; None: it is none."""
        answer: Any
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = words
        if not isinstance(answer, dict):
            said = content[:_WORDS].decode(errors="replace").strip() or "nothing"
            raise ServerGoneError(f"{self.url}/{path} answered with something that is no JSON object: {said}")
        return answer


def _kind_of(status: int) -> type[EngineError]:
    if status in (408, 429):  # a router whose queue is full
        return ServerGoneError
    refusals = {401: ServerWantsKeyError, 403: ServerWantsKeyError, 404: ServerLacksPathError}
    return ServerGoneError if status >= 500 else refusals.get(status, ServerRefusedError)


def _words_of(content: bytes) -> str:
    try:
        body = json.loads(content)
        error = body.get("error", body.get("message", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_WORDS]
    except (ValueError, AttributeError, RecursionError):
        return content.decode(errors="replace").strip()[:_WORDS] or "without a word"
