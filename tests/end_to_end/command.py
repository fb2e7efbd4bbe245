"""Runs the ``milesbatch`` command as a user does: real processes, real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

QUICK = Path(__file__).parent / "quick.yaml"
TIMEOUT_S = 800.0


@dataclass
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str


class Command:
    """One started ``milesbatch`` command."""

    def __init__(
        self,
        *arguments: str | Path,
        cache: Path,
        cwd: Path | None = None,
        path: Path | None = None,
        prefix: Sequence[str] = (),
        faults: Path | None = None,
        stderr: IO[str] | int = subprocess.PIPE,
    ) -> None:
        """``prefix`` is a command that runs this one, ``faults`` a fault plan; ``stderr`` may be a file."""
        environment = {**os.environ, "MILESBATCH_CACHE": str(cache)}
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        if faults is not None:
            environment["MILESBATCH_FAULTS"] = str(faults)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "milesbatch.cli.main", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=cwd,
        )

    def wait(self, timeout_s: float = TIMEOUT_S) -> Ended:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s} s; it said:\n{(err or '')[-4000:]}") from None
        return Ended(self.process.returncode, out, err or "")

    def children(self) -> dict[int, str]:
        """Living child processes: pid -> role name such as ``rollout-1``."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (name := _role_of(entry, self.process.pid)):
                found[int(entry.name)] = name
        return found

    def child(self, name: str) -> int:
        """Process id of a role; waits until it has started."""
        return wait_until(lambda: {v: k for k, v in self.children().items()}.get(name), f"{name} starts")

    def kill_everything(self) -> None:
        """SIGKILL the controller and every role at once, as a power cut would."""
        children = self.children()
        self.process.kill()
        for pid in children:
            kill(pid)
        self.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all processes are gone")


def _role_of(entry: Path, parent: int) -> str | None:
    try:
        if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
            return None
        words = (entry / "environ").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    values = dict(word.split(b"=", 1) for word in words if b"=" in word)
    role, index = values.get(b"MILESBATCH_ROLE_ROLE"), values.get(b"MILESBATCH_ROLE_INDEX")
    return f"{role.decode()}-{index.decode()}" if role and index else None


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait_until(look: Callable[[], Any], what: str, timeout_s: float = 400.0) -> Any:
    """Poll until ``look`` gives something true; returns it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s} s until {what}")


def milesbatch(
    *arguments: str | Path,
    cache: Path,
    cwd: Path | None = None,
    path: Path | None = None,
    prefix: Sequence[str] = (),
    faults: Path | None = None,
) -> Ended:
    return Command(*arguments, cache=cache, cwd=cwd, path=path, prefix=prefix, faults=faults).wait()


def status(run: Path, cache: Path) -> dict[str, Any]:
    ended = milesbatch("status", run, "--json", cache=cache)
    assert ended.out, ended.err
    body: dict[str, Any] = json.loads(ended.out)
    return body


def digests(run: Path) -> list[str]:
    """Weights digest of every published version."""
    found = []
    while (manifest := run / "weights" / f"{len(found):06d}" / "manifest.json").exists():
        found.append(json.loads(manifest.read_text())["weights_digest"])
    return found


def fates(run: Path) -> dict[int, str]:
    """Group id -> fate; fails when a group has two."""
    table: dict[int, str] = {}
    for path in sorted((run / "batches").glob("[0-9]*.json")):
        record = json.loads(path.read_text())
        for group in record["trained"]:
            assert group["group_id"] not in table, f"group {group['group_id']} has two fates"
            table[group["group_id"]] = f"trained({record['step']})"
        for group in record["rejected"]:
            assert group["group_id"] not in table, f"group {group['group_id']} has two fates"
            table[group["group_id"]] = f"rejected({group['reason']}, {record['step']})"
    return table


def events(run: Path, process: str, name: str) -> list[dict[str, Any]]:
    """Events of one kind that a process wrote, over all incarnations."""
    found = []
    for path in sorted((run / "events").glob(f"{process}.i*.jsonl")):
        found += [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == name]
    return found


def check_equal(run: Path, unbroken: Path) -> None:
    """A disturbed run has the digests and fates of the undisturbed one."""
    assert digests(run) == digests(unbroken)
    assert fates(run) == fates(unbroken)
