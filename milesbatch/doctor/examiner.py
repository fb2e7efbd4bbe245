"""The first of two nodes: changes the shared directory, and asks the second one when it sees what.

Owns: the order of the tests, and what was measured. Never: verdicts (``judgement.py``). Invariant: clocks of two hosts are
never compared, but to measure how far they are apart; every other time is measured on one of them.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milesbatch.doctor.child import run_probe
from milesbatch.doctor.facts import node_facts
from milesbatch.doctor.link import Link, LinkError
from milesbatch.doctor.servant import creates
from milesbatch.errors import StorageError
from milesbatch.records import digest_bytes
from milesbatch.store.durable import publish_file, read_optional, replace_hint
from milesbatch.store.operations import current

_PINGS = 30
_FILES = 5
_RACES = 30
_LARGE_BYTES = 64 << 20
_LIMIT_S = 65.0
"""NFS keeps what it knows of a directory for up to 60 s."""
_RACE_S = 30.0
_ENOUGH_S = 5.0
"""A look that took longer is not repeated."""
_COLLECTIVE_S = 60.0


class Examiner:
    """Runs the tests, one after the other, while there is time."""

    def __init__(self, directory: Path, link: Link, within_s: float) -> None:
        self._directory = directory
        self._link = link
        self._deadline_s = time.monotonic() + within_s

    def examine(self) -> dict[str, Any]:
        """What was measured, by test; a test that failed says ``error``, one without time is missing."""
        tests: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
            ("clock", self._clock),
            ("race", self._race),
            ("new_file", self._new_file),
            ("rename", self._rename),
            ("hint", self._hint),
            ("listing", self._listing),
            ("throughput", self._throughput),
        )
        found: dict[str, Any] = {}
        for name, test in tests:
            if self._left_s() < 5.0:
                break
            try:
                found[name] = test()
            except (StorageError, OSError) as error:
                found[name] = {"error": str(error)}
        found["facts"] = {"examiner": node_facts(), "servant": self._link.ask("facts", 90.0)}
        found["collective"] = self._collective(found["facts"])
        self._link.ask("bye")
        return found

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _wait(self, what: str, **more: Any) -> float | None:
        """Seconds until the other node sees something; None when it did not within what it was given."""
        limit_s = max(1.0, min(_LIMIT_S, self._left_s()))
        seconds: float | None = self._link.ask(what, limit_s + 10.0, limit_s=limit_s, **more)["seconds"]
        return seconds

    def _again(self, once: Callable[[int], float | None]) -> dict[str, Any]:
        """Several times, unless it takes long."""
        seconds: list[float | None] = []
        for turn in range(_FILES):
            seconds.append(once(turn))
            if seconds[-1] is None or seconds[-1] > _ENOUGH_S:
                break
        return {"seconds": seconds}

    def _clock(self) -> dict[str, Any]:
        """The quickest of several questions tells most precisely how far the clocks are apart."""
        best = (float("inf"), 0.0)
        for _ in range(_PINGS):
            asked_s = time.time()
            began_s = time.perf_counter()
            there_s = float(self._link.ask("clock")["now_s"])
            trip_s = time.perf_counter() - began_s
            best = min(best, (trip_s, there_s - (asked_s + trip_s / 2)))
        return {"round_trip_s": best[0], "skew_s": best[1]}

    def _race(self) -> dict[str, Any]:
        """Both create the same record at once, again and again."""
        wrong = []
        won_here = 0
        for turn in range(_RACES):
            name = f"race-{turn}.json"
            self._link.send({"do": "create", "name": name, "content": "servant"})
            here = creates(self._directory / name, "examiner")
            there = bool(self._link.receive(_RACE_S)["won"])
            seen_there = self._link.ask("read", name=name)["content"]
            seen_here = (read_optional(self._directory / name) or b"").decode(errors="replace")
            won_here += here
            if here == there or seen_here != seen_there or seen_here != ("examiner" if here else "servant"):
                wrong.append(
                    {"turn": turn, "here": here, "there": there, "seen_here": seen_here, "seen_there": seen_there}
                )
        return {"races": _RACES, "won_here": won_here, "wrong": wrong}

    def _new_file(self) -> dict[str, Any]:
        """A name that the other node has looked for in vain before."""

        def once(turn: int) -> float | None:
            name, data = f"new-{turn}.bin", secrets.token_bytes(4096)
            self._link.ask("is_missing", name=name)
            publish_file(self._directory / name, data)
            return self._wait("wait_for", name=name, digest=digest_bytes(data))

        return self._again(once)

    def _rename(self) -> dict[str, Any]:
        data = secrets.token_bytes(4096)
        digest = digest_bytes(data)
        publish_file(self._directory / "before.bin", data)
        self._wait("wait_for", name="before.bin", digest=digest)
        self._link.ask("is_missing", name="after.bin")
        current().rename(self._directory / "before.bin", self._directory / "after.bin")
        there_s = self._wait("wait_for", name="after.bin", digest=digest)
        return {"there_s": there_s, "gone_s": self._wait("wait_gone", name="before.bin")}

    def _hint(self) -> dict[str, Any]:
        """A file that is replaced again and again, as a controller's sign of life is."""

        def once(turn: int) -> float | None:
            data = f"count {turn}".encode()
            replace_hint(self._directory / "hint", data)
            return self._wait("wait_for", name="hint", digest=digest_bytes(data))

        return self._again(once)

    def _listing(self) -> dict[str, Any]:
        self._link.ask("list")
        publish_file(self._directory / "listed.bin", b"x")
        return {"seconds": self._wait("wait_listed", name="listed.bin")}

    def _throughput(self) -> dict[str, Any]:
        data = secrets.token_bytes(_LARGE_BYTES)
        digest = digest_bytes(data)
        began_s = time.perf_counter()
        publish_file(self._directory / "large.bin", data)
        written_s = time.perf_counter() - began_s
        return {
            "bytes": _LARGE_BYTES,
            "written_s": written_s,
            "read_s": self._wait("wait_for", name="large.bin", digest=digest),
        }

    def _collective(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Both at once; NCCL when both have GPUs that torch can use."""
        gpus = [facts[part]["gpus"] for part in ("examiner", "servant")]
        if any(gpu.get("torch") is None for gpu in gpus):
            return {"skipped": "torch is not on both nodes"}
        if self._left_s() < 10.0:
            return {"skipped": "no time was left"}
        kind = "nccl" if all(gpu["devices"] for gpu in gpus) else "gloo"
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        timeout_s = min(_COLLECTIVE_S, self._left_s())
        address = self._link.ask("address_of_examiner")["address"]
        self._link.send({"do": "collective", "arguments": ["1", address, str(port), kind], "timeout_s": timeout_s})
        answer = run_probe("collective", ["0", address, str(port), kind], timeout_s)
        here = answer.body if answer.body is not None else {"error": answer.error}
        try:
            there = self._link.receive(timeout_s + 10)
        except LinkError as error:
            there = {"error": str(error)}
        return {"kind": kind, "here": here, "there": there}
