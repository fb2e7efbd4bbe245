"""Runs a probe as ``python -m milesbatch.doctor.PROBE`` in a process of its own, with a time limit.

Owns: that process. A broken GPU driver or network hangs whoever touches it, and cannot be interrupted from inside; torch
must not be imported by the commands of a login node. Invariant: it is gone when this returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milesbatch.cluster.context import child_environment


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """What a probe said."""

    body: dict[str, Any] | None
    """The JSON document on the last line of its standard output; None when it said none."""
    error: str = ""
    """Why there is none, in words."""


def run_probe(probe: str, arguments: Sequence[str] = (), timeout_s: float = 90.0) -> ChildAnswer:
    """Run a probe to its end, or end it with everything that it started."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"milesbatch.doctor.{probe}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=child_environment(1, {}),
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return ChildAnswer(None, f"it did not end within {timeout_s:.0f} s")
    finally:
        if process.poll() is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = said.strip().splitlines()[-1:]
    try:
        body = json.loads(last[0]) if last else None
    except ValueError:
        body = None
    if isinstance(body, dict):
        return ChildAnswer(body)
    words = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return ChildAnswer(None, words)
