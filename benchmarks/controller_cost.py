"""What the controller costs while workers wait: ``python benchmarks/controller_cost.py [--workers 64]``.

A real controller loop (HTTP server, leases, heartbeats, files) runs in a process of its own, with a trainer that asks for
nothing, and as many workers as wanted that join, send heartbeats and ask for work that does not exist. Prints the share of one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from milesbatch.cluster.context import RoleContext
from milesbatch.controller.display import PlainDisplay
from milesbatch.controller.loop import ControllerLoop
from milesbatch.recipe.load import load_recipe
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import read_hint
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.wire.client import Controller, Pulse

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"


class Silent:
    """A process that does nothing and never ends."""

    pid = 0

    def exit_code(self) -> int | None:
        return None

    def kill(self) -> bool:
        return True

    def terminate(self) -> None:
        """Nothing to ask."""


class Nobody:
    """A launcher without a place for rollout, whose trainer is silent."""

    address = "127.0.0.1"

    def has(self, role: str) -> bool:
        return role == "trainer"

    def node_of(self, context: RoleContext) -> str:
        return ""

    def is_lost(self, context: RoleContext) -> bool:
        return False

    def start(self, context: RoleContext, threads: int) -> Silent:
        return Silent()


def control(directory: Path) -> None:
    """The controller's process: never ends by itself."""
    layout = RunLayout(directory)
    recipe = load_recipe(RECIPE, ["tracking.kind=none"])
    lay_out(layout, recipe)
    commit_run(layout, recipe, {})
    incarnation = take_over(layout, Claimant(), {})

    async def run() -> None:
        await ControllerLoop(layout, recipe, incarnation, Nobody(), PlainDisplay(recipe.steps)).run()

    asyncio.run(run())


def work(directory: Path, first: int, count: int) -> None:
    """Workers' sides: a heartbeat thread and a thread that asks for leases, for each."""
    layout = RunLayout(directory)
    hint = read_hint(layout, 1)
    assert hint is not None
    recipe = load_recipe(RECIPE)
    threads = []
    for index in range(first, first + count):
        context = RoleContext(
            run_directory=directory,
            role="rollout",
            index=index,
            count=count,
            incarnation=1,
            attempt=1,
            controller_url=hint["address"],
            token=layout.token(1).read_text(),
            parent_pid=1,
            heartbeat_s=recipe.slurm.heartbeat_s,
        )
        pulse = Pulse(context)
        pulse.state = "waiting"
        pulse.start()
        threads.append(threading.Thread(target=_ask, args=(Controller(context),), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _ask(controller: Controller) -> None:
    while True:
        controller.lease([], -1)


def floor_share(seconds: float) -> float:
    """A loop that only wakes ten times a second."""

    async def idle() -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await asyncio.sleep(0.1)

    before = time.process_time()
    asyncio.run(idle())
    return (time.process_time() - before) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="controller-cost-")) / "run"
    spawn = multiprocessing.get_context("spawn")
    controller = spawn.Process(target=control, args=(directory,), daemon=True)
    controller.start()
    layout = RunLayout(directory)
    while read_hint(layout, 1) is None:
        time.sleep(0.1)
    sides = [
        spawn.Process(target=work, args=(directory, 1000 + 16 * n, 16), daemon=True)
        for n in range(arguments.workers // 16)
    ]
    for side in sides:
        side.start()
    time.sleep(10.0)  # everybody has joined
    process = psutil.Process(controller.pid)
    before, began_s = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(arguments.seconds)
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began_s)
    floor = floor_share(5.0)
    print(json.dumps({"workers": arguments.workers, "share_of_a_core": round(share, 4), "floor": round(floor, 4)}))
    for side in (*sides, controller):
        side.kill()
    return 0 if share < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
