"""The launcher of one machine: each role is a subprocess of the controller, with its own process group and log.

No process outlives the controller: each role asks the kernel to be killed when its parent dies (``die_with_parent``),
and the controller ends whole process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from milesbatch.cluster.context import RoleContext, child_environment
from milesbatch.cluster.stamps import without_stamps
from milesbatch.store.durable import storage_error
from milesbatch.store.layout import RunLayout

ROLE_MODULES = {
    "trainer": "milesbatch.trainer",
    "rollout": "milesbatch.rollout",
    "tracking": "milesbatch.tracking",
    "evaluation": "milesbatch.evaluation",
}
_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent ends, however it ends. Called first thing by every role process.

    The parent may have died before this call; then the kernel has already given this process another parent.
    ``parent_pid`` 0 means that something else ends this process.
    """
    if parent_pid == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@dataclass(slots=True)
class LocalProcess:
    """A subprocess in its own process group."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def kill(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True


class LocalLauncher:
    """Starts roles as subprocesses of this process. Must be used from the main thread: the parent-death signal of Linux
    is sent when the *thread* that started the child ends."""

    address = "127.0.0.1"

    def has(self, role: str) -> bool:
        return True

    def node_of(self, context: RoleContext) -> str:
        return ""

    def is_lost(self, context: RoleContext) -> bool:
        return False

    def start(self, context: RoleContext, threads: int) -> LocalProcess:
        """Start one role process; its output is appended to its log of this incarnation.

        Raises:
            StorageError: the log cannot be written.
        """
        log = RunLayout(context.run_directory).log(context.name, context.incarnation)
        extra = {**context.to_environment(), "GLOO_SOCKET_IFNAME": "lo"}
        try:
            with open(log, "ab") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", ROLE_MODULES[context.role]],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=child_environment(threads, extra),
                    start_new_session=True,
                )
        except OSError as error:
            raise storage_error(log, error) from error
        return LocalProcess(process)


def run_ranks(module: str, arguments: Sequence[str], ranks: int, threads: int) -> tuple[int, str, str]:
    """Run ``python -m module ARGUMENTS`` once for each rank (``{rank}`` in an argument is filled in), to the end.

    Returns the first exit status that is not 0 (or 0), rank 0's output, and what the failed rank said. When one rank
    fails, the others are ended.
    """
    environment = child_environment(threads, {"GLOO_SOCKET_IFNAME": "lo"})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *(text.replace("{rank}", str(rank)) for text in arguments)],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as pool:
        said = [pool.submit(process.communicate) for process in processes]
        wait(said, return_when=FIRST_COMPLETED)
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    outputs = [future.result() for future in said]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode > 0:
            return process.returncode, outputs[0][0], errors
    return max(abs(process.returncode) for process in processes), outputs[0][0], outputs[0][1]


def run_limited(module: str, arguments: Sequence[str], limit_s: float) -> str | None:
    """Run ``python -m module ARGUMENTS`` and end it after ``limit_s``; None when it ended well, else why not, in words."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"it was not done after {limit_s:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"it ended with exit status {done.returncode}"


def log_tail(log: Path, max_bytes: int = 8192) -> str:
    """The last lines of a log, without their times: what a dead process said last."""
    try:
        with open(log, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - max_bytes))
            return without_stamps(stream.read().decode(errors="replace"))
    except OSError:
        return ""
