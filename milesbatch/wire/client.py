"""How a role process talks to its controller: typed calls, bounded waits, heartbeats from a thread of its own.

A refused token or incarnation means that this process is a zombie: ``FencedError``. A controller that cannot be reached
for several heartbeats is dead, and so is this incarnation: the process ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

import httpx

from milesbatch.cluster.context import RoleContext
from milesbatch.errors import EXIT_TEMPFAIL, FencedError, StoppedToContinue
from milesbatch.faults.points import point
from milesbatch.wire import messages as wire

A = TypeVar("A", bound=wire.Message)
_WAIT_S = 5.0
_IDLE_WAIT_S = 20.0
_IDLE_PACE = 4
_MISSED_HEARTBEATS = 5
_RETRY_S = 0.5
_KEEP_S = 60.0
"""An idle connection is used again: longer than any pause between heartbeats, shorter than the server's patience."""


class Controller:
    """The controller as seen from a role process."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._http = httpx.Client(
            base_url=context.controller_url,
            headers={
                "x-milesbatch-token": context.token,
                "x-milesbatch-incarnation": str(context.incarnation),
                "x-milesbatch-process": context.process,
            },
            timeout=httpx.Timeout(_WAIT_S * 6, connect=_WAIT_S),
            limits=httpx.Limits(keepalive_expiry=_KEEP_S),
            trust_env=False,  # a proxy between nodes of one job is never wanted
        )

    def ask(self, path: str, message: wire.Message, answer: type[A]) -> A:
        """Send one message; a lost connection is tried again for a few heartbeats (every message may be repeated).

        Raises:
            FencedError: this process belongs to an older incarnation.
            StoppedToContinue: the controller cannot be reached.
        """
        body = message.model_dump_json()
        deadline_s = time.monotonic() + _MISSED_HEARTBEATS * self._context.heartbeat_s
        while True:
            try:
                point("wire.send")
                response = self._http.post(f"/v1/{path}", content=body)
                break
            except (httpx.TransportError, ConnectionError) as error:
                if time.monotonic() > deadline_s:
                    raise StoppedToContinue(
                        f"the controller at {self._context.controller_url} does not answer ({error})",
                        mend="give the same command again; the run goes on from its files",
                    ) from error
                time.sleep(_RETRY_S)
        if response.status_code == 409:
            raise FencedError(
                f"the controller at {self._context.controller_url} goes on without {self._context.name}, start"
                f" {self._context.attempt} in incarnation {self._context.incarnation}: it was given up, and replaced",
                mend="nothing: the run goes on without this process",
            )
        response.raise_for_status()
        return answer.model_validate_json(response.content)

    def lease(self, holding: Sequence[int], policy_version: int) -> wire.LeaseAnswer:
        """Ask for another block; waits for one only when nothing is held."""
        request = wire.LeaseRequest(
            name=self._context.name,
            wait_s=0.0 if holding else _IDLE_WAIT_S,
            holding=tuple(holding),
            policy_version=policy_version,
        )
        return self.ask("lease", request, wire.LeaseAnswer)

    def commit(self, request: wire.CommitRequest) -> bool:
        return self.ask("commit", request, wire.CommitReply).accepted

    def batch(self, step: int) -> wire.BatchAnswer:
        return self.ask("batch", wire.BatchRequest(step=step, wait_s=_WAIT_S), wire.BatchAnswer)

    def regenerate(self, groups: tuple[int, ...]) -> wire.RegenerateAnswer:
        """Lost groups that were generated again, when they are there."""
        request = wire.RegenerateRequest(groups=groups, wait_s=_WAIT_S)
        return self.ask("regenerate", request, wire.RegenerateAnswer)

    def unreachable(self, version: int, what: str) -> bool:
        """Say that a policy version cannot be rebuilt (``what`` empty: ask again); True while it is not mended."""
        request = wire.Unreachable(name=self._context.name, version=version, what=what, wait_s=_WAIT_S)
        return self.ask("unreachable", request, wire.UnreachableAnswer).pending

    def next_broadcast(self, after: int) -> wire.BroadcastCall:
        """Be ready for a broadcast of weights; waits a while for one."""
        request = wire.BroadcastPoll(process=self._context.process, after=after, wait_s=_WAIT_S)
        return self.ask("broadcast-poll", request, wire.BroadcastCall)

    def is_coming(self, version: int) -> wire.BroadcastAnswer:
        """Is ``version`` on its way to this process by broadcast?"""
        question = wire.BroadcastQuestion(process=self._context.process, version=version)
        return self.ask("broadcast-question", question, wire.BroadcastAnswer)

    def tell(self, path: str, message: wire.Message) -> None:
        self.ask(path, message, wire.Ok)

    def meet(self, address: str | None) -> str:
        """Rank 0 gives the address of its store; the others get it."""
        while True:
            message = wire.Rendezvous(attempt=self._context.attempt, address=address, wait_s=_WAIT_S)
            answer = self.ask("rendezvous", message, wire.RendezvousAnswer)
            if answer.address is not None:
                return answer.address


class Pulse:
    """Heartbeats of this process, from a daemon thread. Set ``state``, ``policy_version`` … and call ``moved`` on progress."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._controller = Controller(context)
        self.state = "starting"
        self.policy_version = -1
        self.samples_in_flight = 0
        self.published = -1
        self.should_stop = False
        self.was_warned = False
        self._moves = 0
        self._outside = 0
        self._trouble = ""
        self._servers = ""
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; from the main thread. In a job step, SIGTERM may be the beginning of a preemption's grace time: the controller
        hears of it and decides. A step that is to end at once gets SIGKILL."""
        if self._context.parent_pid == 0:
            signal.signal(signal.SIGTERM, self._warned)
        self._thread.start()

    def _warned(self, number: int, frame: object) -> None:
        self.was_warned = True

    def moved(self, amount: int = 1) -> None:
        """Progress of any kind."""
        self._trouble = ""
        self._moves += amount

    def lives(self) -> None:
        """A sign of life of something else than what may be waiting for space, which goes on waiting."""
        self._moves += 1

    def waits_for_space(self, text: str) -> None:
        """A disk is full, as ``text`` says: told to the controller until the next progress, and not to be taken for a hang."""
        self.moved()
        self._trouble = text

    def show_servers(self, text: str) -> None:
        """Which of its inference servers do not work, as ``text`` says; empty: all do."""
        self._servers = text

    def set_activity(self, counter: int) -> None:
        """Progress as an outside counter shows it (for example tokens generated)."""
        self._outside = counter

    def _beat_forever(self) -> None:
        while True:
            try:
                self._beat()
            except (FencedError, StoppedToContinue, httpx.HTTPError) as error:
                self._end(error)
            # One that waits has an open request at the controller besides: fewer are enough, and 64 idle workers cheap.
            time.sleep(self._context.heartbeat_s * (_IDLE_PACE if self.state == "waiting" else 1))

    def _beat(self) -> None:
        beat = wire.Heartbeat(
            name=self._context.name,
            attempt=self._context.attempt,
            host=socket.gethostname(),
            state=self.state,
            policy_version=self.policy_version,
            samples_in_flight=self.samples_in_flight,
            activity=self._moves + self._outside,
            warned=self.was_warned,
            trouble=self._trouble,
            servers=self._servers,
        )
        answer = self._controller.ask("heartbeat", beat, wire.HeartbeatAnswer)
        self.published = max(self.published, answer.published)
        self.should_stop = answer.stop

    def _end(self, error: Exception) -> None:
        """This incarnation is over: end at once, from a thread, whatever the main thread is in."""
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_TEMPFAIL)
