"""Stands between an engine and a real server, and spoils what the engine asks, as it is told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

Spoil = Callable[[int], str]
"""Number of the request for tokens, from 0 -> what becomes of it: pass, 500, 400, lost, cut, or slow:SECONDS."""


@dataclass
class FaultyProxy:
    """One HTTP proxy in threads; only ``/generate`` is ever spoiled."""

    target: str
    spoil: Spoil = field(default=lambda number: "pass")
    asked: int = 0
    port: int = 0
    """At which it listens; 0: at a free one."""

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._client = httpx.Client(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """As if its host were gone: connections end, and new ones are refused."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._client.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            suppress(OSError, httpx.HTTPError, ValueError, RuntimeError),
            connection.makefile("rb") as stream,
        ):
            while line := stream.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (header := stream.readline().decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", 0)))
                if not self._answer(connection, method, path, headers, body):
                    return

    def _answer(self, connection: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> bool:
        what = "pass"
        if urlsplit(path).path == "/generate":
            with self._lock:
                number, self.asked = self.asked, self.asked + 1
            what = self.spoil(number)
        if what == "lost":
            return False
        if what in ("500", "400"):
            return self._send(connection, int(what), b'{"error": {"message": "spoiled on purpose"}}')
        if what.startswith("slow:"):
            time.sleep(float(what.removeprefix("slow:")))
        kept = {name: value for name, value in headers.items() if name in ("authorization", "content-type")}
        answer = self._client.request(method, self.target + path, content=body, headers=kept)
        if what == "cut":
            connection.sendall(_head(200, len(answer.content)) + answer.content[: len(answer.content) // 2])
            return False
        return self._send(connection, answer.status_code, answer.content)

    def _send(self, connection: socket.socket, status: int, content: bytes) -> bool:
        connection.sendall(_head(status, len(content)) + content)
        return True


def _head(status: int, length: int) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode()
