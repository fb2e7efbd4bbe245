"""Waiting for something to change, in the controller's one event loop."""

from __future__ import annotations

import asyncio
import time


class Change:
    """Wakes all who wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Everybody who waits looks again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, deadline_s: float) -> bool:
        """False when the deadline (monotonic) passed first."""
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return False
        try:
            await asyncio.wait_for(self._event.wait(), remaining_s)
        except TimeoutError:
            return False
        return True
