"""No process of a server is left, however its worker, its guard or itself ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from milesbatch.engines.sglang.launch import ServerProcess, decisive_lines, port_was_taken, server_gone
from milesbatch.errors import InputError

# A "server" that hides its helpers as well as a process can: a session of its own, and a parent that is gone.
SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
hidden = subprocess.Popen(["setsid", "sh", "-c", "sleep 600 & echo $! >> " + sys.argv[1]])
open(sys.argv[1], "a").write(f"{os.getpid()}\\n{child.pid}\\n")
time.sleep(600)
"""
WORKER = """
import sys, time
from pathlib import Path
from milesbatch.engines.sglang.launch import ServerProcess
here = Path(sys.argv[1])
process = ServerProcess.start([sys.executable, "-c", sys.argv[2], str(here / "pids")], here / "log", {}, here / "rubbish")
print(process.guard.pid, flush=True)
time.sleep(600)
"""


def until(look: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline_s, f"waited until {what}"
        time.sleep(0.02)


def pids(here: Path) -> list[int]:
    file = here / "pids"
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def server_among(candidates: list[int]) -> int:
    """The one that runs ``SERVER``: a helper may still be the shell that is about to start it."""
    (server,) = [pid for pid in candidates if SERVER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return server


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(here: Path) -> ServerProcess:
    (here / "rubbish").mkdir()
    process = ServerProcess.start(
        [sys.executable, "-c", SERVER, str(here / "pids")], here / "log", {}, here / "rubbish"
    )
    until(lambda: len(pids(here)) == 3, "the server has started its helpers")
    assert all(map(is_alive, pids(here)))
    return process


def check_nothing_left(here: Path) -> None:
    until(lambda: not any(map(is_alive, pids(here))), "all are gone", 15)


def test_a_killed_server_takes_all_with_it(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    assert not any(map(is_alive, pids(tmp_path))), "at once, when kill returns"
    assert (tmp_path / "rubbish").exists(), "the worker lives and may start another"


def test_a_server_without_its_first_thread_is_found(tmp_path: Path) -> None:
    """As any process with threads is for a moment when it is killed: the kernel calls it a zombie, and it has children."""
    script = SERVER.replace(
        "time.sleep(600)",
        "import ctypes, threading\nthreading.Thread(target=time.sleep, args=(600,)).start()"
        "\nctypes.CDLL(None).syscall(60, 0)",
    )
    process = ServerProcess.start([sys.executable, "-c", script, str(tmp_path / "pids")], tmp_path / "log", {}, None)
    until(lambda: len(pids(tmp_path)) == 3, "the server has started its helpers")
    until(lambda: sum(map(is_alive, pids(tmp_path))) == 2, "its first thread is gone")
    process.kill()
    assert not any(map(is_alive, pids(tmp_path)))
    assert process.exit_code() == 0, "the guard was not killed for being late"


def test_at_the_end_the_directory_goes_too(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill(is_over=True)
    assert not any(map(is_alive, pids(tmp_path)))
    assert not (tmp_path / "rubbish").exists()


def test_a_server_that_does_not_end_in_peace_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milesbatch.engines.sglang.launch._END_S", 1.0)
    process = start(tmp_path)
    process.end()
    assert not any(map(is_alive, pids(tmp_path)))


def test_a_server_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    server = server_among(pids(tmp_path))
    os.kill(server, signal.SIGKILL)
    until(lambda: process.exit_code() is not None, "the guard has noticed")
    assert process.exit_code() == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "rubbish").mkdir()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), SERVER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    guard = int(worker.stdout.readline())
    until(lambda: len(pids(tmp_path)) == 3, "the server has started its helpers")
    worker.send_signal(number)
    worker.wait()
    check_nothing_left(tmp_path)
    until(lambda: not is_alive(guard), "the guard is gone")
    assert not (tmp_path / "rubbish").exists()


def test_a_killed_guard_takes_the_server_with_it(tmp_path: Path) -> None:
    """Its helpers are SGLang's own to end: they ask the kernel for that."""
    process = start(tmp_path)
    server = server_among(pids(tmp_path))
    os.kill(process.guard.pid, signal.SIGKILL)
    until(lambda: not is_alive(server), "the server is gone", 10)
    for pid in pids(tmp_path):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_servers_of_a_killed_guard_shared_is_removed(tmp_path: Path) -> None:
    """As SGLang's load snapshots: mapped by a process that gets SIGKILL, and by name nobody's."""
    shared = Path("/dev/shm") / f"sglang_loads_test{os.getpid()}_0.shm"
    other = shared.with_name(f"sglang_loads_other{os.getpid()}_0.shm")
    script = (
        "import mmap, os, sys, time\nfile = open(sys.argv[1], 'w+b')\nfile.truncate(4096)\n"
        "memory = mmap.mmap(file.fileno(), 4096)\nopen(sys.argv[2], 'w').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    )
    other.write_bytes(b"somebody else's")
    try:
        command = [sys.executable, "-c", script, str(shared), str(tmp_path / "pids")]
        process = ServerProcess.start(command, tmp_path / "log", {}, None)
        until(lambda: len(pids(tmp_path)) == 1, "it has started")
        process.remember()
        os.kill(process.guard.pid, signal.SIGKILL)
        until(lambda: process.exit_code() == -signal.SIGKILL, "the guard is gone")
        process.kill()
        assert not shared.exists()
        assert other.exists()
        check_nothing_left(tmp_path)
    finally:
        shared.unlink(missing_ok=True)
        other.unlink()


BATCH = "[2026-11-30 17:40:45] Prefill batch, #new-seq: 8, #new-token: 23, #cached-token: 17, token usage: 0.00\n"
KILLED = (
    "[2026-11-30 17:40:44] The server is fired up and ready to roll!\n"
    + BATCH
    + BATCH.replace("Prefill", "Decode")
    + "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1"
    " leaked semaphore objects to clean up at shutdown\n  warnings.warn('resource_tracker: There appear to be %d '\n"
)
CRASH = "Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
ARGUMENTS = "[2026-11-30 17:38:18] server_args={'model_path': '/model', 'api_key': 's3cret'}\n"


@pytest.mark.parametrize("said", ["", KILLED, "half way\n"])
@pytest.mark.parametrize(
    ("code", "how"),
    [(-9, "(the guard was killed by signal 9, and the server with it)"), (137, "(killed by signal 9)")],
)
def test_a_server_that_a_signal_ended_had_no_last_words(tmp_path: Path, code: int, how: str, said: str) -> None:
    assert server_gone("server-0", code, tmp_path / "log", said).what == f"server-0 ended {how}"


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1, "", "server-0 ended (exit status 1): it said nothing"),
        (1, KILLED, "server-0 ended (exit status 1): The server is fired up and ready to roll!"),
        (131, KILLED + f"[2026-11-30 17:40:46] {CRASH}\n", f"server-0 ended (killed by signal 3): {CRASH}"),
        (137, "MemoryError: none is left\n" + BATCH, "server-0 ended (killed by signal 9): MemoryError: none is left"),
    ],
)
def test_how_a_server_ended(tmp_path: Path, code: int, said: str, told: str) -> None:
    assert server_gone("server-0", code, tmp_path / "log", said).what == told


def test_the_log_with_the_key_is_for_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("of an earlier start\n")
    (tmp_path / "old").chmod(0o644)
    for name in ("old", "new"):
        process = ServerProcess.start([sys.executable, "-c", "print('began')"], tmp_path / name, {}, None)
        until(lambda process=process: process.exit_code() is not None, "it has ended")  # type: ignore[misc]
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert "began" in (tmp_path / name).read_text()
    assert "of an earlier start" in (tmp_path / "old").read_text()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="make sglang-cpu"):
        ServerProcess.start([str(tmp_path / "python")], tmp_path / "log", {}, None)


def test_the_log_of_this_start_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ValueError: of an earlier start\n")
    process = ServerProcess.start([sys.executable, "-c", "raise KeyError('now')"], tmp_path / "log", {}, None)
    until(lambda: process.exit_code() is not None, "it has ended")
    assert process.exit_code() == 1
    assert decisive_lines(process.said()) == "KeyError: 'now'"
    assert "earlier" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        ("", "it said nothing"),
        ("loading\n\nhalf way\n", "loading\nhalf way"),
        (
            '[2026-11-30 11:02:03] ready\n[11:02:04] INFO:     127.0.0.1:3 - "GET /health_generate HTTP/1.1" 200 OK\n'
            'INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 500 Internal Server Error\n',
            "ready",
        ),
        ('INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK\n', "it said nothing"),
        (BATCH, "it said nothing"),
        (ARGUMENTS + "loading\n", "loading"),
        (
            "[2026-11-30 10:01:15 TP0] Scheduler hit an exception: Traceback (most recent call last):\n  File x\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n[2026-11-30 10:01:16] bye\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --nonsense\n",
            "launch_server.py: error: unrecognized arguments: --nonsense",
        ),
    ],
)
def test_decisive_lines(said: str, lines: str) -> None:
    assert decisive_lines(said) == lines


def test_a_taken_port_is_recognised() -> None:
    assert port_was_taken(
        "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    )
    assert not port_was_taken("the server is fired up and ready to roll")
