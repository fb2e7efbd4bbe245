"""Where a server is: one that is started here, or one that somebody else runs.

Owns coming to a server that answers, and letting go of it. Invariant: what :meth:`ServerPlace.open` gives is the server
that was meant: one that was started here shows by its key that it is no other at the same port.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from milesbatch.engines.sglang.client import (
    ServerClient,
    ServerLacksPathError,
    ServerRefusedError,
    ServerWantsKeyError,
)
from milesbatch.engines.sglang.launch import (
    ServerProcess,
    decisive_lines,
    free_port,
    port_was_taken,
    server_gone,
)
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.errors import EngineError, InputError, StorageError
from milesbatch.store.durable import make_directory

_LOOK_S = 0.5
_MOST_PORTS = 8
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Coming:
    """What a server that is not there yet does, in words."""

    now: str
    still: str
    """Before ``for 30 s``."""
    again: str


class ServerPlace(Protocol):
    """One place with a server."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def coming(self) -> Coming:
        """Until it is there."""

    async def open(self, timeout_s: float, sign: Callable[[], None]) -> ServerClient:
        """Come to a server that generates; ``sign`` is called whenever it gets on.

        Raises:
            EngineError: there is none by then; says why, as the server itself does.
            InputError: it can never be.
        """

    def check(self) -> None:
        """Raises:
        EngineError: its process has ended.
        """

    def leave(self, *, is_over: bool = False) -> None:
        """Let go of it; nothing that was started is left. ``is_over``: for good. Blocks."""


@dataclass(slots=True)
class StartedServer:
    """A server of this worker's own, on this host."""

    name: str
    settings: ServerSettings
    log: Path
    memory: Path
    """A directory for what it needs; goes when the server is gone."""
    threads: int = 1
    process: ServerProcess | None = None
    url: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """What requests must show."""

    @property
    def coming(self) -> Coming:
        return Coming("is starting", "has been starting", "it is starting again")

    async def open(self, timeout_s: float, sign: Callable[[], None]) -> ServerClient:
        deadline_s = time.monotonic() + timeout_s
        for _ in range(_MOST_PORTS):
            port = free_port()
            process = await asyncio.to_thread(self._start, port)
            client = ServerClient(self.url, self.key)
            try:
                await self._await(process, client, deadline_s, timeout_s, sign)
                return client
            except _PortTakenError:
                await client.close()
                await asyncio.to_thread(self.leave)
            except BaseException:
                await client.close()
                raise
        raise EngineError(f"{self.name}: {_MOST_PORTS} ports that were free were taken when the server came to them")

    def _start(self, port: int) -> ServerProcess:
        command = self.settings.command(port, self._write_configuration())
        self.url = f"http://127.0.0.1:{port}"
        self.process = ServerProcess.start(command, self.log, self.settings.environment(), self.memory, self.threads)
        return self.process

    def _write_configuration(self) -> Path:
        path = self.memory / f"{self.name}.yaml"
        try:
            make_directory(self.memory)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"api-key: {self.key}\n")
        except (
            OSError,
            StorageError,
        ) as error:  # of this host alone: the worker's own writing there waits, and says so
            reason = error.what if isinstance(error, StorageError) else error
            raise EngineError(
                f"{self.name} cannot be started: {path} cannot be written: {reason}",
                mend="see whether the filesystem of rollout.sglang.memory_dir is full",
            ) from error
        return path

    async def _await(
        self,
        process: ServerProcess,
        client: ServerClient,
        deadline_s: float,
        timeout_s: float,
        sign: Callable[[], None],
    ) -> None:
        size = 0
        while True:
            code = process.exit_code()
            said = process.said()
            if code is not None:
                if port_was_taken(said):
                    raise _PortTakenError
                raise server_gone(self.name, code, self.log, said)
            if len(said) != size:
                size = len(said)
                sign()
            if await client.is_healthy(_ANSWER_S):
                try:
                    await client.get("model_info", _ANSWER_S)
                except ServerRefusedError as error:  # another server, which does not know this key
                    raise _PortTakenError from error
                process.remember()
                return
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"{self.name} does not generate {timeout_s:.0f} s after its start; it said: {decisive_lines(said)}",
                    mend=f"read {self.log}; a large model may need a longer rollout.sglang.start_timeout_s",
                )
            await asyncio.sleep(_LOOK_S)

    def check(self) -> None:
        process = self.process
        if process is not None and (code := process.exit_code()) is not None:
            raise server_gone(self.name, code, self.log, process.said())

    def leave(self, *, is_over: bool = False) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill(is_over=is_over)


@dataclass(slots=True)
class AttachedServer:
    """A server that somebody else runs; it is waited for, and never ended."""

    url: str
    key: str = ""
    """What requests must show, where the server wants that."""

    @property
    def name(self) -> str:
        return self.url

    @property
    def coming(self) -> Coming:
        return Coming("is waited for", "has not generated", "it is waited for, and whoever runs it must start it again")

    async def open(self, timeout_s: float, sign: Callable[[], None]) -> ServerClient:
        client = ServerClient(self.url, self.key)
        try:
            await self._await(client, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def _await(self, client: ServerClient, deadline_s: float, timeout_s: float) -> None:
        while not await self._generates(client):
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"the server at {self.url} does not generate, for {timeout_s:.0f} s",
                    mend="start it, or take it out of rollout.sglang.urls",
                )
            await asyncio.sleep(_LOOK_S)

    async def _generates(self, client: ServerClient) -> bool:
        """Raises:
        InputError: it is no server, and never will be.
        """
        try:
            await client.get("model_info", _ANSWER_S)
        except ServerLacksPathError as error:
            raise InputError(
                f"what answers at {self.url} is no SGLang server: it has no /model_info; a router in front of servers has none",
                mend="name the servers in rollout.sglang.urls, for each must be reached for its weights, and a router"
                " in front of them in rollout.sglang.routers",
            ) from error
        except ServerWantsKeyError as error:
            raise InputError(
                f"the server at {self.url} wants {'another' if self.key else 'a'} key",
                mend="name a file with the key that it was started with (--api-key) in rollout.sglang.key_file (or --key-file)",
            ) from error
        except EngineError:
            pass  # it is not up: what follows says so
        return await client.is_healthy(_ANSWER_S)

    def check(self) -> None:
        """Nobody here knows its process."""

    def leave(self, *, is_over: bool = False) -> None:
        """It stays."""


class _PortTakenError(Exception):
    """Somebody else has the port."""
