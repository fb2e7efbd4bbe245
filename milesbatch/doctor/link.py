"""A line between the two nodes of the doctor's job: JSON lines over TCP, with time limits.

Owns: the connection. Never: what is asked. Invariant: whoever connects must know the secret that lies in the directory that
both see, so nobody else is answered.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milesbatch.store.durable import publish_file, read_optional
from milesbatch.store.sight import refresh

_CONNECT_S = 3.0
_ADDRESS = "address.json"


class LinkError(Exception):
    """The other node did not answer, or could not be reached; says what was tried."""


@dataclass(slots=True)
class Link:
    """One end."""

    connection: socket.socket
    address: str
    """Under which the other node was reached (on the end that connected)."""
    _rest: bytes = b""

    def send(self, body: dict[str, Any]) -> None:
        """Raises:
        LinkError: the other node is gone.
        """
        try:
            self.connection.sendall(json.dumps(body).encode() + b"\n")
        except OSError as error:
            raise LinkError(f"the other node is gone: {error}") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            LinkError: none came in time, or the other node is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            try:
                self.connection.settimeout(max(deadline_s - time.monotonic(), 0.01))
                data = self.connection.recv(1 << 16)
            except OSError as error:
                raise LinkError(f"the other node did not answer within {timeout_s:.0f} s ({error})") from error
            if not data:
                raise LinkError("the other node is gone")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        body = json.loads(line)
        if not isinstance(body, dict):
            raise LinkError(f"the other node said {line[:80]!r}")
        return body

    def ask(self, what: str, timeout_s: float = 30.0, **more: Any) -> dict[str, Any]:
        """The answer to a question; see :meth:`receive` for errors."""
        self.send({"do": what, **more})
        return self.receive(timeout_s)


@contextlib.contextmanager
def offer(directory: Path, addresses: Sequence[str], timeout_s: float) -> Iterator[Link]:
    """Listen on every interface, say where in ``directory``, and wait for the other node.

    Raises:
        LinkError: nobody came.
    """
    token = secrets.token_hex(16)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        publish_file(
            directory / _ADDRESS, json.dumps({"addresses": list(addresses), "port": port, "token": token}).encode()
        )
        deadline_s = time.monotonic() + timeout_s
        while True:
            server.settimeout(max(deadline_s - time.monotonic(), 0.01))
            try:
                connection, (peer, *_) = server.accept()
            except OSError as error:
                raise LinkError(f"the other node did not connect within {timeout_s:.0f} s") from error
            link = Link(connection, peer)
            with contextlib.suppress(LinkError, ValueError), connection:
                if link.receive(_CONNECT_S).get("token") == token:
                    link.send({"ok": True})
                    yield link
                    return


@contextlib.contextmanager
def accept_offer(directory: Path, timeout_s: float) -> Iterator[Link]:
    """Connect to whoever offers in ``directory``, by the first of its addresses that works.

    Raises:
        LinkError: no offer is visible in time, or no address works; says which.
    """
    offered = _find_offer(directory, timeout_s)
    tried = []
    for address in offered["addresses"]:
        try:
            connection = socket.create_connection((address, offered["port"]), timeout=_CONNECT_S)
        except OSError as error:
            tried.append(f"{address}: {error}")
            continue
        with connection:
            link = Link(connection, address)
            link.send({"token": offered["token"]})
            link.receive(_CONNECT_S)
            yield link
            return
    raise LinkError(f"no address of the other node works ({'; '.join(tried)})")


def _find_offer(directory: Path, timeout_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        data = read_optional(directory / _ADDRESS)
        if data:
            found: dict[str, Any] = json.loads(data)
            return found
        refresh(directory)
        time.sleep(0.5)
    raise LinkError(f"{directory / _ADDRESS}, written by the other node, was not visible within {timeout_s:.0f} s")
