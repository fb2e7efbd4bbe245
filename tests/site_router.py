"""A real router (sglang-router) in front of servers, as a site would run one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.engines.sglang.launch import free_port


@dataclass
class SiteRouter:
    """A started router."""

    url: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, python: Path, urls: Sequence[str], key: str, log: Path) -> SiteRouter:
        """In front of ``urls``, whose servers want ``key``; it asks one after the other."""
        port = free_port()
        words = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--api-key", key, "--prometheus-port", str(free_port()), "--policy", "round_robin"]
        words += ["--health-check-interval-secs", "2", "--worker-urls", *urls]
        with open(log, "wb") as stream:
            process = subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        return cls(f"http://127.0.0.1:{port}", process)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
