"""Who can take weights by broadcast, and which broadcast is on its way. Memory only; no bytes pass here.

    worker:   poll ............................> call: round 7, generation 2, rank 1 of 3, the store's address
    trainer:  members? > begin (generation 2) ─┘       ... end
    worker:   is version 12 on its way to me? ─> round 7, for 9 s more

The worker that polls is ready; one that was lost is forgotten with everything else that it had. What is not known here costs a
read of the version's files and nothing else: a controller that was just started knows of nobody.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from milesbatch.controller.change import Change
from milesbatch.wire import messages as wire

_FRESH_S = 10.0
"""For so long a worker counts as ready after its last question."""


@dataclass(frozen=True, slots=True)
class _Round:
    number: int
    begin: wire.BroadcastBegin
    generation: int
    deadline_s: float

    @property
    def answer(self) -> wire.BroadcastBegun:
        return wire.BroadcastBegun(round=self.number, generation=self.generation)

    def call(self, process: str) -> wire.BroadcastCall:
        return wire.BroadcastCall(
            round=self.number,
            generation=self.generation,
            store=self.begin.store,
            rank=1 + self.begin.processes.index(process),
            size=1 + len(self.begin.processes),
            version=self.begin.version,
            within_s=self.deadline_s - time.monotonic(),
        )


class Broadcasts:
    """Methods are named after the messages of :mod:`milesbatch.wire.messages`."""

    def __init__(self) -> None:
        self._ready_until_s: dict[str, float] = {}
        self._rounds = 0
        self._generations = 0
        self._current: _Round | None = None
        self._change = Change()

    async def poll(self, request: wire.BroadcastPoll) -> wire.BroadcastCall:
        """The next round that this worker has a part in; it counts as ready while it asks, and a little longer."""
        deadline_s = time.monotonic() + request.wait_s
        self._ready_until_s[request.process] = deadline_s + _FRESH_S
        while True:
            current = self._running()
            if current is not None and current.number > request.after and request.process in current.begin.processes:
                self._ready_until_s.pop(request.process, None)
                return current.call(request.process)
            if request.process not in self._ready_until_s or not await self._change.wait(deadline_s):
                return wire.BroadcastCall()

    def members(self) -> wire.BroadcastMembers:
        """Workers that are ready. The order is that of their names, so that the same workers are the same group."""
        now_s = time.monotonic()
        ready = sorted(process for process, until_s in self._ready_until_s.items() if until_s > now_s)
        return wire.BroadcastMembers(processes=tuple(ready))

    def begin(self, message: wire.BroadcastBegin) -> wire.BroadcastBegun:
        """A round begins; told again (its answer was lost), it is the same one."""
        if self._current is not None and self._current.begin == message:
            return self._current.answer
        self._rounds += 1
        if message.generation < 0:
            self._generations += 1
        generation = message.generation if message.generation >= 0 else self._generations
        for process in message.processes:  # ready again when the round has ended well, or when they ask again
            self._ready_until_s.pop(process, None)
        self._current = _Round(self._rounds, message, generation, time.monotonic() + message.within_s)
        self._change.tell()
        return self._current.answer

    def end(self, message: wire.BroadcastEnd) -> None:
        if self._current is not None and self._current.number == message.round:
            self._current = None
            for process in message.confirmed:
                self._ready_until_s.setdefault(process, time.monotonic() + _FRESH_S)

    def question(self, message: wire.BroadcastQuestion) -> wire.BroadcastAnswer:
        current = self._running()
        if current is None or current.begin.version != message.version:
            return wire.BroadcastAnswer()
        if message.process not in current.begin.processes:
            return wire.BroadcastAnswer()
        return wire.BroadcastAnswer(round=current.number, within_s=current.deadline_s - time.monotonic())

    def forget(self, name: str) -> None:
        """A process is gone, in whichever start; with the trainer goes what it was sending."""
        for process in [process for process in self._ready_until_s if process.rpartition(".")[0] == name]:
            del self._ready_until_s[process]
        if name == "trainer-0":
            self._current = None
        self._change.tell()

    def _running(self) -> _Round | None:
        current = self._current
        return current if current is not None and time.monotonic() < current.deadline_s else None
