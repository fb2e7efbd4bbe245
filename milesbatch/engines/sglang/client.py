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

import httpx

from milesbatch.errors import EngineError

_CONNECT_S = 5.0
_WORDS = 300


class ServerGoneError(EngineError):
    """No answer, or one that says that the server itself has failed; another server, or a later try, may answer."""


class ServerRefusedError(EngineError):
    """The server does not do what was asked, and says why; asking again cannot help."""


class ServerClient:
    """HTTP to one server. For one event loop."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, limit_s: float) -> dict[str, Any]:
        """The JSON object at ``path``, or an empty one where there are no words.

        Raises:
            ServerGoneError, ServerRefusedError: as they say.
        """
        return await self._ask("GET", path, None, limit_s)

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send ``body`` and return the JSON object that comes back.

        Raises:
            ServerGoneError, ServerRefusedError: as they say; the latter also when the answer says ``success: false``.
        """
        answer = await self._ask("POST", path, body, limit_s)
        if answer.get("success") is False:
            raise ServerRefusedError(f"{self.url}/{path} failed: {answer.get('message', 'no reason given')}")
        return answer

    async def is_healthy(self, limit_s: float) -> bool:
        """Has it generated a token when asked, or for somebody else meanwhile? Not while it is paused."""
        try:
            await self.get("health_generate", limit_s)
        except EngineError:
            return False
        return True

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        timeout = httpx.Timeout(limit_s, connect=min(_CONNECT_S, limit_s), pool=None)
        try:
            response = await self._http.request(method, f"/{path}", content=content, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ServerGoneError(f"{self.url}/{path} did not answer within {limit_s:.0f} s") from error
        except (httpx.HTTPError, OSError) as error:
            raise ServerGoneError(f"{self.url}/{path} cannot be asked: {type(error).__name__} {error}") from error
        if response.status_code >= 500:
            raise ServerGoneError(f"{self.url}/{path} answered {response.status_code}: {_words_of(response)}")
        if response.status_code >= 400:
            raise ServerRefusedError(f"{self.url}/{path} answered {response.status_code}: {_words_of(response)}")
        try:
            answer = json.loads(response.content or b"{}")
        except ValueError:  # some control calls answer in plain words
            answer = {"text": response.text}
        if not isinstance(answer, dict):
            raise ServerGoneError(f"{self.url}/{path} answered with something that is no JSON object")
        return answer


def _words_of(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body.get("message", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_WORDS]
    except (ValueError, AttributeError):
        return response.text.strip()[:_WORDS] or "without a word"
