"""A router (``sglang-router``) that a site has put in front of an engine's servers.

    engine ── requests ──> router ──> any of the servers
       └───── weights, pauses, health, aborts ──> each server

Owns asking it. Never: control calls, of which it knows none. Invariant: nothing is believed for having come through it.
Which server answered is not known, and does not matter: an answer names the weights that drew each token, each change of
weights at each server has a name of its own, and only proven ones count (``weights.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from milesbatch.engines.sglang.client import ServerClient, ServerLacksPathError, ServerWantsKeyError
from milesbatch.errors import EngineError, InputError

_LOOK_S = 0.5
_ANSWER_S = 30.0
_SETTLE_S = 10.0
"""For which a router that was just started may still be looking at its servers."""


class Router:
    """One router."""

    def __init__(self, url: str, key: str = "") -> None:
        """``key``: what its servers want to be shown."""
        self.url = url
        self._client = ServerClient(url, key)

    async def close(self) -> None:
        await self._client.close()

    async def generate(self, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """A server's answer, or its own.

        Raises:
            ServerGoneError, ServerRefusedError: as :meth:`ServerClient.post` says.
        """
        return await self._client.post("generate", body, limit_s)

    async def await_up(self, urls: Sequence[str], timeout_s: float, tell: Callable[[str], None]) -> None:
        """Until it answers and has one of ``urls`` behind it; what it has besides, or lacks a moment later, is told.

        Raises:
            EngineError: it does not, within ``timeout_s``. InputError: it is no router, or wants another key.
        """
        began_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            try:
                behind = await self._servers()
            except ServerLacksPathError as error:
                raise InputError(
                    f"what answers at {self.url} is no router: it has no /workers",
                    mend="name sglang-router's own address in rollout.sglang.routers, and its servers' in rollout.sglang.urls",
                ) from error
            except ServerWantsKeyError as error:
                raise InputError(
                    f"the router at {self.url} wants another key",
                    mend="start it with the key of its servers (--api-key), which stands in rollout.sglang.key_file",
                ) from error
            except EngineError as error:
                behind, problem = set(), f"does not answer, for {timeout_s:.0f} s: {error.what}"
            else:
                problem = f"has none of {', '.join(urls)} behind it, for {timeout_s:.0f} s"
            if behind >= set(urls) or (behind & set(urls) and waited_s > _SETTLE_S):
                break
            if waited_s > timeout_s:
                raise EngineError(
                    f"the router at {self.url} {problem}", mend="start it, or take it out of rollout.sglang.routers"
                )
            await asyncio.sleep(_LOOK_S)
        if strangers := sorted(behind - set(urls)):
            tell(
                f"the router at {self.url} has {', '.join(strangers)} behind it, whose answers are not taken: not in urls"
            )
        if missing := sorted(set(urls) - behind):
            tell(f"the router at {self.url} does not have {', '.join(missing)} behind it, to which no request will go")

    async def _servers(self) -> set[str]:
        found = (await self._client.get("workers", _ANSWER_S)).get("workers")
        entries = found if isinstance(found, list) else []
        return {str(entry.get("url")).rstrip("/") for entry in entries if isinstance(entry, dict)}
