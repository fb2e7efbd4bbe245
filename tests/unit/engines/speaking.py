"""Something that answers over HTTP with given words, to see what is made of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Speaker:
    """Answers with the words that it is given for a path, else with an empty JSON object."""

    words: dict[str, bytes] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def speaking() -> Iterator[Speaker]:
    made = Speaker()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.strip("/")
            self.rfile.read(int(self.headers.get("content-length", 0)))
            made.asked.append(path)
            words = made.words.get(path, b"{}")
            self.send_response(made.status.get(path, 200))
            self.send_header("content-length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
