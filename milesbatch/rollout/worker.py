"""Sets a rollout worker up and hands over to its loop (:mod:`milesbatch.rollout.loop`)."""

from __future__ import annotations

import sys
import time

from milesbatch.cluster.context import RoleContext
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.store.sight import first_sight
from milesbatch.wire.client import Controller, Pulse


def main(context: RoleContext) -> None:
    """Run one worker until the controller says stop."""
    pulse = Pulse(context)
    pulse.start()  # before torch is imported: importing takes seconds, and the controller should see a living process
    began_s = time.monotonic()

    import torch

    from milesbatch.engines.embedded import EmbeddedEngine
    from milesbatch.environments.prompts import open_prompts
    from milesbatch.models.load import context_length, load_skeleton, load_tokenizer, stop_token_ids
    from milesbatch.rollout.episodes import EpisodeRunner, Recorder
    from milesbatch.rollout.loop import WorkerLoop
    from milesbatch.rollout.reaching import open_follower
    from milesbatch.trajectories.schema import FileMetadata

    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation, first_sight(layout.root))
    recipe = run.recipe
    torch.set_num_threads(recipe.rollout.threads)
    torch.use_deterministic_algorithms(recipe.determinism == "bitwise", warn_only=True)
    tokenizer = load_tokenizer(layout.model)
    engine = EmbeddedEngine(
        load_skeleton(layout.model, torch.float32),
        max_length=context_length(layout.model),
        max_concurrent_samples=recipe.rollout.max_concurrent_samples,
        isolate_calls=recipe.determinism == "bitwise",
        stop_text=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
    )
    recorder = Recorder(context.name, context.incarnation)
    runner = EpisodeRunner(recipe, open_prompts(recipe), tokenizer, stop_token_ids(layout.model), recorder)
    events = EventLog(layout, context.name, context.incarnation)
    events.write("ready", seconds=round(time.monotonic() - began_s, 2))
    metadata = FileMetadata(
        run_id=run.record.run_id,
        tokenizer_digest=run.record.fingerprints["tokenizer"],
        chat_template_digest=run.record.fingerprints.get("chat_template", ""),
    )

    def tell(text: str) -> None:
        pulse.moved()  # no heartbeat may take the wait for a hang
        print(text, file=sys.stderr, flush=True)

    follower = open_follower(run, context.incarnation, tell)
    loop = WorkerLoop(context, run, engine, runner, follower, Controller(context), pulse, events, metadata)
    try:
        loop.run()
    finally:
        engine.close()
        events.close()
