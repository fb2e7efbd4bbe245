"""One server as its engine sees it, and how the servers of one engine are treated. What happens to it is ``fleet.py``'s."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from milesbatch.engines.sglang.client import ServerClient
from milesbatch.engines.sglang.fitness import Needed
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.engines.sglang.serving import ServerPlace
from milesbatch.engines.sglang.weights import PauseMode
from milesbatch.errors import EngineError

State = Literal["starting", "ready", "serving", "lost", "given up"]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How the servers are treated."""

    pause: PauseMode
    start_timeout_s: float
    health_timeout_s: float
    request_timeout_s: float
    update_timeout_s: float
    listener: FleetListener
    needed: Needed | None = None
    """What servers must be; None: they are not asked."""


@dataclass(slots=True, eq=False)
class Server:
    """One server."""

    place: ServerPlace
    state: State = "starting"
    client: ServerClient | None = None
    epoch: int = 0
    """Counts how often what it was asked became worthless."""
    version: int = -1
    weights_name: str = ""
    """What it called the weights that it proved last."""
    in_flight: int = 0
    was_up: bool = False
    """It was such a server as is needed once: what answers there otherwise now may be over soon."""
    failures: int = 0
    trouble: EngineError | None = None
    why: str = ""
    """Of its last failure, since which it has not served."""
    is_changing: bool = False
    is_late: bool = False
    """Its weights have been changing for longer than anybody waits for."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One change of its weights after the other."""
    activation: int = 0
    """The one whose weights it has proven; 0: none."""
    changes: int = 0
    """Counts changes of weights that have begun."""
    doubt: asyncio.Task[bool] | None = None
    """A question whether it still generates, which all who doubt it share."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.place.name

    def condition(self) -> str:
        """Why it does not work, in one line; empty when it does."""
        words = self.place.coming
        if not self.why:  # one that is up and has not proven any weights yet is well
            return f"{self.name} {words.now}" if self.state == "starting" else ""
        then = {"starting": words.again, "given up": "it is given up for now", "ready": "it is tried again"}
        return f"{self.why}; {then[self.state]}" if self.state in then else self.why
