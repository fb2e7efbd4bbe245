"""Sets a rollout worker up and hands over to its loop (:mod:`milesbatch.rollout.loop`)."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from milesbatch.cluster.context import RoleContext
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.store.sight import first_sight
from milesbatch.wire.client import Controller, Pulse

if TYPE_CHECKING:
    from milesbatch.engines.protocol import RolloutEngine
    from milesbatch.rollout.servers import Servers
    from milesbatch.rollout.staged import StagedFollower
    from milesbatch.weights.follower import Follower


def main(context: RoleContext) -> None:
    """Run one worker until the controller says stop."""
    pulse = Pulse(context)
    pulse.start()  # before torch is imported: importing takes seconds, and the controller should see a living process
    began_s = time.monotonic()

    from milesbatch.environments.prompts import open_prompts
    from milesbatch.models.load import load_tokenizer, stop_token_ids
    from milesbatch.rollout.engine import open_engine
    from milesbatch.rollout.episodes import EpisodeRunner, Recorder
    from milesbatch.rollout.loop import WorkerLoop
    from milesbatch.rollout.reaching import open_follower
    from milesbatch.trajectories.schema import FileMetadata

    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation, first_sight(layout.root))
    recipe = run.recipe
    tokenizer = load_tokenizer(layout.model)
    events = EventLog(layout, context.name, context.incarnation)

    def tell(text: str) -> None:
        pulse.moved()  # no heartbeat may take the wait for a hang
        print(text, file=sys.stderr, flush=True)

    engine: RolloutEngine
    follower: Follower | StagedFollower
    servers: Servers | None = None
    if recipe.rollout.engine == "sglang":
        from milesbatch.rollout.listening import listener_of
        from milesbatch.rollout.servers import Owner, Servers

        servers = Servers(run, Owner.worker(context, recipe.rollout.sglang), listener_of(pulse, events, tell))
        try:
            engine, follower = servers.open_engine(tokenizer), servers.follower
        except BaseException:
            servers.close()
            raise
    else:
        engine = open_engine(layout.model, recipe, tokenizer)
        # In place, for the engine's model is a copy of its own.
        follower = open_follower(run, context.incarnation, tell, in_place=True)
    recorder = Recorder(context.name, context.incarnation)
    runner = EpisodeRunner(recipe, open_prompts(recipe), tokenizer, stop_token_ids(layout.model), recorder)
    events.write("ready", seconds=round(time.monotonic() - began_s, 2))
    metadata = FileMetadata.of_run(run.record)

    loop = WorkerLoop(context, run, engine, runner, follower, Controller(context), pulse, events, metadata)
    try:
        loop.run()
    finally:
        engine.close()
        if servers is not None:
            servers.close()
        events.close()
