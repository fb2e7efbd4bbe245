"""Starting and ending one server process, and finding out from its log why it did not start.

Owns the processes of one server, through its guard (:mod:`milesbatch.engines.sglang.guard`), its log file, and the
choice of its port. Never: talks to the server. Invariant: after :meth:`ServerProcess.kill`, or after the end of this
process, however it comes about, none of them is left.

SGLang writes its arguments, and so the server's key, into the log: that is for the user's eyes alone, and the line is
never quoted.

A port that is free now may be taken a moment later. Nobody can rule that out for a program that takes a port's number;
so the log is asked (:func:`port_was_taken`), and each server has a key of its own, so that another one at the same port
is never taken for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.cluster.context import child_environment
from milesbatch.engines.sglang.guard import END, OVER, shared_memory
from milesbatch.errors import EngineError, InputError
from milesbatch.store.durable import storage_error

_END_S = 20.0
_KILL_S = 35.0
_TAIL_BYTES = 65536
_MOST_LINES = 3
_FATAL = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*|.*\b(out of memory|[Cc]annot allocate|No space left).*"
    r"|.*launch_server\.py: error:.*|.*cannot be started:.*|Subprocess .* crashed with exit code.*|.* watchdog timeout.*"
)
_TAKEN = re.compile(r"address already in use|port \d+ is (already )?(in use|not available)", re.IGNORECASE)
_SMALL_TALK = re.compile(
    r'.*"[A-Z]+ \S+ HTTP/[\d.]+" \d{3}\b'  # a request that was answered
    r"|(Prefill|Decode) batch\b"  # statistics
    r"|.*\bresource_tracker\b"  # what Python tidies up after a process that was killed
    r"|server_args="  # with the server's key
)
"""What tells nothing of an end, or must not be quoted."""
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")
_SILENCE = "it said nothing"


@dataclass(slots=True)
class ServerProcess:
    """A started server behind its guard."""

    guard: subprocess.Popen[bytes]
    log: Path
    log_begin: int
    """Where what it says begins in the log."""
    _shared: set[Path] = field(default_factory=set)

    @classmethod
    def start(
        cls, command: Sequence[str], log: Path, extra: Mapping[str, str], rubbish: Path | None, threads: int = 1
    ) -> ServerProcess:
        """Start ``command``; its output is appended to ``log``, which others cannot read. ``rubbish`` is a directory that
        goes when the server is gone.

        Raises:
            InputError: there is no such program.
            StorageError: the log cannot be written.
        """
        if not os.access(command[0], os.X_OK):
            raise no_environment(command[0])
        guard = [sys.executable, "-m", "milesbatch.engines.sglang.guard", "" if rubbish is None else str(rubbish)]
        try:
            with open(log, "ab", opener=_private) as stream:
                begin = stream.tell()
                process = subprocess.Popen(
                    [*guard, *command],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=child_environment(threads, extra),
                    start_new_session=True,
                )
        except OSError as error:
            raise storage_error(log, error) from error
        return cls(process, log, begin)

    def exit_code(self) -> int | None:
        """128 and the signal's number when one ended the server; negative when one ended its guard."""
        return self.guard.poll()

    def remember(self) -> None:
        """What the server's processes share now is removed when they are gone, whoever ended the guard."""
        self._shared = shared_memory(self.guard.pid)

    def end(self) -> None:
        """End it in peace, within seconds; whatever is left is killed."""
        with contextlib.suppress(OSError):
            assert self.guard.stdin is not None
            self.guard.stdin.write(END)
            self.guard.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(_END_S)
        self.kill()

    def kill(self, *, is_over: bool = False) -> None:
        """End it and everything that it started, at once; ``is_over``: its directory goes too."""
        with contextlib.suppress(OSError):
            assert self.guard.stdin is not None
            if is_over:
                self.guard.stdin.write(OVER)
            self.guard.stdin.close()
        try:
            self.guard.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guard.pid, signal.SIGKILL)
            self.guard.wait()
        for path in self._shared:
            path.unlink(missing_ok=True)

    def said(self) -> str:
        """The end of what it has said since this start."""
        try:
            with open(self.log, "rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self.log_begin, size - _TAIL_BYTES))
                return stream.read().decode(errors="replace")
        except OSError:
            return ""


def _private(path: str, flags: int) -> int:
    """Open a file that this user alone can read, also one that is there and was readable for others."""
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # a filesystem without modes
        os.fchmod(descriptor, 0o600)
    return descriptor


def no_environment(python: str) -> InputError:
    """SGLang's own environment is not there."""
    return InputError(
        f"rollout.sglang.python: {python} is not there, or cannot be executed",
        mend="name the Python of an environment in which SGLang is installed; `make sglang-cpu` makes one for machines"
        " without a GPU",
    )


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_was_taken(said: str) -> bool:
    return _TAKEN.search(said) is not None


def decisive_lines(said: str) -> str:
    """Those lines of a log that say why a server ended: its last errors, else its last words."""
    lines = _telling(said)
    return _joined(_fatal(lines) or lines) or _SILENCE


def server_gone(name: str, code: int, log: Path, said: str) -> EngineError:
    """The error of a server that ended by itself. One that a signal ended had no time for last words: they are of something
    else, unless they are an error.
    """
    if 0 <= code <= 128:
        how, why = f"exit status {code}", decisive_lines(said)
    else:
        how = f"killed by signal {code - 128}"
        if code < 0:
            how = f"the guard was killed by signal {-code}, and the server with it"
        why = _joined(_fatal(_telling(said)))
    return EngineError(f"{name} ended ({how})" + (f": {why}" if why else ""), mend=f"read {log}")


def _telling(said: str) -> list[str]:
    lines = [_PREFIX.sub("", line).rstrip() for line in said.splitlines() if line.strip()]
    return [line for line in lines if line and not _SMALL_TALK.match(line)]


def _fatal(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if _FATAL.match(line)]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(dict.fromkeys(lines[-_MOST_LINES:]))
