"""What a process that has SGLang servers says of them: to its log, to the event log, and to the controller.

Owns nothing; worker and evaluator alike. Invariant: each word is a sign of life too, for what servers do takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable

from milesbatch.cluster.last_words import of_servers
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.errors import StoppedToContinue
from milesbatch.store.events import EventLog
from milesbatch.wire.client import Pulse


def listener_of(pulse: Pulse, events: EventLog, tell: Callable[[str], None]) -> FleetListener:
    """``tell`` writes to the log of the process."""

    def tell_of_servers(text: str) -> None:
        tell(of_servers(text))
        events.write("engine_server", text=text)

    def tell_of_space(text: str) -> None:
        if pulse.should_stop:
            raise StoppedToContinue(f"stopped while waiting for space; {text}")
        tell(text)
        pulse.waits_for_space(text)
        events.write("waiting_for_space", error=text)

    return FleetListener(tell_of_servers, pulse.show_servers, pulse.lives, tell_of_space)
