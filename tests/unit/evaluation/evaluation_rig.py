"""Real evaluators on a real run directory: weights, follower, engine, episodes and files; only the model is a tiny one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from builders import past_incarnation
from engine_models import make_model
from worker_lives import STOP_ID, Place, Tokenizer, make_place

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.evaluation.asking import Asking, open_asking
from milesbatch.evaluation.evaluator import Evaluator, Generating
from milesbatch.evaluation.reader import record_paths
from milesbatch.records import EvaluationRecord
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.rollout.reaching import open_follower
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Trajectory

SECTION: dict[str, Any] = {
    "prompts": {"kind": "arithmetic", "min_operand": 100, "max_operand": 199},
    "num_prompts": 5,
    "every_steps": 1,
    "max_new_tokens": 12,
}
"""Sums of three digits; training asks those of two."""
METADATA = FileMetadata("small-1", "xxh128:" + "0" * 32)


@dataclass
class Rig:
    """One run, and the evaluators that were made for it."""

    place: Place
    asking: Asking
    evaluators: list[Evaluator] = field(default_factory=list)
    engines: list[EmbeddedEngine] = field(default_factory=list)

    @property
    def layout(self) -> RunLayout:
        return self.place.layout

    def evaluator(self, should_stop: Callable[[], bool] = lambda: False) -> Evaluator:
        """A new process, as far as the run can tell."""
        run = open_run(self.layout, self.place.incarnation)

        def prepare() -> Generating:
            engine = EmbeddedEngine(
                make_model(), max_length=96, max_concurrent_samples=4, stop_text=Tokenizer().decode, isolate_calls=True
            )
            self.engines.append(engine)
            return Generating(engine, self.runner())

        follower = open_follower(run, self.place.incarnation, lambda text: None)
        made = Evaluator(self.layout, self.asking, follower, METADATA, prepare, should_stop)
        self.evaluators.append(made)
        return made

    def runner(self) -> EpisodeRunner:
        recorder, asking = Recorder("evaluation-0", self.place.incarnation), self.asking
        return EpisodeRunner(self.place.recipe, asking.held_out, Tokenizer(), (STOP_ID,), recorder, asking.rules)

    def digest(self, version: int) -> str:
        found = self.evaluator().published_digest(version)
        assert found is not None
        return found

    def evaluate(self, version: int, evaluator: Evaluator | None = None) -> EvaluationRecord:
        """As a follower does: what is known is not made again."""
        evaluator = evaluator or self.evaluator()
        digest = self.digest(version)
        return evaluator.known(version, digest) or evaluator.evaluate(version, digest)

    @property
    def tokens_generated(self) -> int:
        """Of all evaluators together."""
        return sum(engine.tokens_generated for engine in self.engines)

    def samples(self, record: EvaluationRecord) -> list[Trajectory]:
        (ref,) = record.files
        return read_trajectories(self.layout.evaluation(record.version) / ref.path, digest=ref.digest)

    def names(self, version: int) -> list[str]:
        """All files of a version's folder."""
        return sorted(path.name for path in self.layout.evaluation(version).iterdir())

    def records(self, version: int) -> list[Path]:
        return record_paths(self.layout, version)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def make_rig(root: Path, *versions: int, **section: Any) -> Rig:
    torch.set_num_threads(1)
    place = make_place(root, *versions, determinism="bitwise", evaluation={**SECTION, **section})
    place.incarnation = past_incarnation(place.layout)
    assert place.recipe.evaluation is not None
    return Rig(place, open_asking(place.recipe, place.recipe.evaluation))
