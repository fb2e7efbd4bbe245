"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere. Writes to stderr only."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from milesbatch.cluster.stamps import is_stamped
from milesbatch.controller.hub import Hub
from milesbatch.wire import messages as wire

_SPARKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    def step(self, message: wire.StepDone, hub: Hub) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self, hub: Hub) -> None: ...
    def close(self) -> None: ...


def step_line(message: wire.StepDone, steps: int, tokens_per_s: float) -> str:
    """One step as one line."""
    m = message.metrics
    parts = [
        f"step {message.step}/{steps}",
        f"reward {m.get('reward_mean', float('nan')):.3f}",
        f"lag {m.get('lag_mean', 0.0):.1f}",
        f"loss {m.get('loss', 0.0):+.4f}",
        f"length {m.get('length_mean', 0.0):.1f}",
        f"{tokens_per_s:.0f} tokens/s",
        f"train {m.get('train_s', 0.0):.2f} s",
        f"waited {m.get('wait_s', 0.0):.2f} s",
    ]
    return "  ".join(parts) + ("  (replayed)" if message.replayed else "")


class PlainDisplay:
    """A line for each step and note."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, message: wire.StepDone, hub: Hub) -> None:
        self._print(step_line(message, self._steps, hub.throughput.tokens_per_s(time.monotonic())))

    def note(self, text: str) -> None:
        self._print(text)

    def tick(self, hub: Hub) -> None:
        """Nothing between steps: a log is not a terminal."""

    def close(self) -> None:
        """Nothing to put back."""

    def _print(self, text: str) -> None:
        # A reader that went away (`| head`), or a full disk behind the log: never a reason to stop a run.
        with contextlib.suppress(OSError, ValueError):
            now = "" if is_stamped(sys.stderr) else f"{time.strftime('%H:%M:%S')}  "
            print(now + text, file=sys.stderr, flush=True)


class LiveDisplay:
    """A panel that is redrawn a few times a second; notes scroll above it."""

    def __init__(self, name: str, steps: int) -> None:
        self._name = name
        self._steps = steps
        self._rewards: list[float] = []
        self._line = "starting the roles"
        self._step = 0
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, message: wire.StepDone, hub: Hub) -> None:
        self._step = message.step
        self._rewards.append(message.metrics.get("reward_mean", 0.0))
        self._line = step_line(message, self._steps, hub.throughput.tokens_per_s(time.monotonic()))

    def note(self, text: str) -> None:
        self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {text}"))

    def tick(self, hub: Hub) -> None:
        self._live.update(self._panel(hub))

    def close(self) -> None:
        self._live.stop()

    def _panel(self, hub: Hub) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_row(Text(self._name, style="bold"), ProgressBar(total=self._steps, completed=self._step, width=40))
        table.add_row("last step", self._line)
        table.add_row("reward", sparkline(self._rewards))
        table.add_row("waits for", hub.waiting_for())
        for worker in hub.status().workers:
            text = f"{worker['state']}, version {worker['policy_version']}, {worker['samples_in_flight']} in flight"
            if worker["servers"]:
                text += f"; {worker['servers']}"
            table.add_row(str(worker["name"]), text)
        return table


def sparkline(values: list[float], width: int = 60) -> str:
    """The last values as one line of bars, scaled between their smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_SPARKS[int((value - low) * scale)] for value in shown)
    return f"{bars} {shown[-1]:.3f} (from {values[0]:.3f})"


def open_display(name: str, steps: int) -> Display:
    """The live panel when stderr is a terminal, plain lines otherwise."""
    return LiveDisplay(name, steps) if sys.stderr.isatty() else PlainDisplay(steps)
