"""Lives of one rollout worker on a run directory: the real loop, engine, hub and files, in one thread, without HTTP.

Place ──> life(steps=7) ──> the worker generates; after 7 decoding steps the controller says stop
      └─> life()        ──> goes on until ``blocks`` are committed
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from builders import commit_batch, make_recipe, make_ref, make_run, past_incarnation, unfenced
from engine_models import VOCAB, make_model, weights_of

from milesbatch.cluster.context import RoleContext
from milesbatch.controller.hub import Hub
from milesbatch.decisions.fates import FateTable
from milesbatch.engines.decode_batch import DecodeBatch, Finished
from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.environments.prompts import open_prompts
from milesbatch.recipe.models import Recipe
from milesbatch.records import GroupRef
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.rollout.loop import WorkerLoop
from milesbatch.rollout.reaching import open_follower
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.store.run import open_run
from milesbatch.store.unfinished import saved_blocks
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.weights.publisher import Publisher
from milesbatch.wire import messages as wire

LONGEST = 40
STOP_ID = VOCAB - 1
_ALPHABET = "0123456789+-*="


class Tokenizer:
    """A token for each character of arithmetic; others are spelled by letters."""

    bos_token_id, unk_token_id = 0, 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.get_vocab().get(character, 1) for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {character: 2 + index for index, character in enumerate(_ALPHABET)}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Pulse:
    """A pulse without a heart."""

    def __init__(self, published: int) -> None:
        self.state, self.policy_version, self.samples_in_flight = "starting", -1, 0
        self.published, self.should_stop = published, False

    def moved(self, amount: int = 1) -> None: ...
    def set_activity(self, counter: int) -> None: ...
    def waits_for_space(self, text: str) -> None: ...


class Side:
    """The worker's controller: hands out ``blocks`` blocks, and stops when they are committed."""

    def __init__(self, hub: Hub, blocks: int) -> None:
        self.hub, self.blocks = hub, blocks
        self.answers: list[wire.LeaseAnswer] = []
        self.commits: list[wire.CommitRequest] = []

    def lease(self, holding: Sequence[int], policy_version: int) -> wire.LeaseAnswer:
        if len(self.answers) == self.blocks:
            return wire.LeaseAnswer(stop=not holding)
        request = wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=tuple(holding), policy_version=policy_version)
        answer = asyncio.run(self.hub.lease(request))
        assert answer.groups or answer.stop
        self.answers.append(answer)
        return answer

    def commit(self, request: wire.CommitRequest) -> bool:
        self.commits.append(request)
        return self.hub.commit(request).accepted


@dataclass
class Life:
    """What a worker did in one incarnation."""

    incarnation: int
    answers: list[wire.LeaseAnswer]
    commits: list[wire.CommitRequest]
    trajectories: list[Trajectory]
    tokens_generated: int
    events: list[dict[str, Any]]
    error: BaseException | None

    def event(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


@dataclass
class Place:
    """A run directory with published weights of a tiny model."""

    layout: RunLayout
    recipe: Recipe
    incarnation: int = 0
    ready: list[GroupRef] = field(default_factory=list)

    def publish(self, *versions: int, salt: float = 0.0) -> None:
        """Step v, of groups far away, makes version v: the model with (v + ``salt``) / 20 added to one matrix."""
        for version in versions:
            if version > 0:
                commit_batch(self.layout, version, [make_ref(1000 + version)], max(self.incarnation, 1))
            content = weights_of(make_model()).content
            name = next(name for name in content if "down_proj" in name)
            content[name] += (version + salt) / 20
            publisher = Publisher(self.layout, max(self.incarnation, 1), keyframe_every=1, before_commit=unfenced)
            publisher.publish(version, list(content.items()), {})

    @property
    def newest(self) -> int:
        return max(int(path.parent.name) for path in self.layout.weights.glob("*/manifest.json"))

    @property
    def inflight(self) -> list[str]:
        return [str(name) for name in saved_blocks(self.layout)]

    def life(
        self,
        steps: int | None = None,
        *,
        blocks: int = 1,
        unfinished: Sequence[TrajectoryName] | None = None,
        stop: str = "pulse",
        rows: int = 16,
        then: Callable[[], None] = lambda: None,
    ) -> Life:
        """The next incarnation's worker, told to stop after ``steps`` decoding steps: by its ``pulse``, by the ``lease`` it
        asks for, because the run is ``finished``; or ``nobody looks``; or it hears of ``a newer version`` instead. ``then``
        happens just after the take-over."""
        torch.set_num_threads(1)
        self.incarnation = past_incarnation(self.layout)
        then()
        hub = Hub(self.recipe)
        left = saved_blocks(self.layout) if unfinished is None else unfinished
        hub.restore(FateTable(), self.ready, self.newest, left)
        hub.last_step = self.newest
        side, pulse = Side(hub, blocks), Pulse(self.newest)
        events = EventLog(self.layout, "rollout-0", self.incarnation)
        made = EmbeddedEngine(
            make_model(),
            max_length=96,
            max_concurrent_samples=rows,
            stop_text=Tokenizer().decode,
            isolate_calls=self.recipe.determinism == "bitwise",
        )
        loop = self._loop(side, pulse, events, made)
        error: BaseException | None = None
        with mock.patch.object(DecodeBatch, "step", _stopping(made, pulse, hub, side, steps, stop)):
            try:
                loop.run()
            except Exception as caught:  # noqa: BLE001 - for the test to judge
                error = caught
            finally:
                made.close()
                events.close()
        lines = self.layout.event_log("rollout-0", self.incarnation).read_text().splitlines()
        paths = sorted({group.path for commit in side.commits for group in commit.groups})
        found = [t for path in paths for t in read_trajectories(self.layout.trajectory(path))]
        told = [json.loads(line) for line in lines]
        return Life(self.incarnation, side.answers, side.commits, found, made.tokens_generated, told, error)

    def _loop(self, side: Any, pulse: Any, events: EventLog, engine: EmbeddedEngine) -> WorkerLoop:
        run = open_run(self.layout, self.incarnation)
        context = RoleContext(self.layout.root, "rollout", 0, 1, self.incarnation, 1, "", "", 0, 1.0)
        runner = EpisodeRunner(
            self.recipe,
            open_prompts(self.recipe),
            Tokenizer(),
            (STOP_ID,),
            Recorder(context.name, context.incarnation),
        )
        metadata = FileMetadata(run.record.run_id, "xxh128:" + "0" * 32)
        follower = open_follower(run, self.incarnation, lambda text: None)
        return WorkerLoop(context, run, engine, runner, follower, side, pulse, events, metadata)


def _stopping(engine: EmbeddedEngine, pulse: Pulse, hub: Hub, side: Side, steps: int | None, stop: str) -> Any:
    """A decoding step that says stop after ``steps`` of them, and then holds still until the engine is told to end."""
    original, count = DecodeBatch.step, 0

    def step(batch: DecodeBatch) -> list[Finished]:
        nonlocal count
        finished = original(batch)
        count += 1
        if count == steps:
            if stop == "a newer version":
                pulse.published += 1
            elif stop in ("pulse", "nobody looks"):
                pulse.should_stop = True
            else:
                hub.is_stopping, hub.is_finished = stop == "lease", stop == "finished"
                side.blocks += 1  # it asks once more
            with engine._wake:
                if stop == "nobody looks":
                    return finished
                engine._wake.wait_for(lambda: engine._is_closing, timeout=20)
        return finished

    return step


def rollout(longest: int = LONGEST, room: int = 4) -> dict[str, Any]:
    """The recipe's section: with ``room`` for more samples than a block's 4 the worker goes on asking for leases."""
    return {
        "samples_per_group": 2,
        "groups_per_lease": 2,
        "staleness": 2,
        "max_concurrent_samples": room,
        "sampling": {"max_new_tokens": longest},
    }


def make_place(root: Path, *versions: int, **changes: Any) -> Place:
    """A relaxed run: blocks of 2 groups with 2 samples, responses of up to 40 tokens; ``changes`` by section."""
    recipe = make_recipe(
        **{
            "determinism": "relaxed",
            "seed": 5,
            "steps": 20,
            "model": {"kind": "made"},
            "rollout": rollout(),
            "environment": {"reward": "milesbatch.environments.rewards:digit_match"},
            **changes,
        }
    )
    place = Place(make_run(root / "run", recipe), recipe)
    place.publish(*versions or (0,))
    return place
