"""The only builder of paths in a run directory. Pure: no I/O. The page behind it is ``docs/format.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from milesbatch.ids import NUMBER, WORKER, number

_TRAJECTORY = re.compile(
    rf"(?P<first>{NUMBER})-(?P<last>{NUMBER})\.i(?P<incarnation>{NUMBER})\.(?P<worker>{WORKER})\.(?P<tag>[0-9a-f]{{16}})\.arrow"
)


TRAJECTORY_END = b"ARROW1"
"""How every whole trajectory file ends (the Arrow IPC file format)."""


@dataclass(frozen=True, slots=True)
class TrajectoryName:
    """What the name of a file of trajectories, or of unfinished episodes, says: its groups, who wrote it and in which
    incarnation, and a tag of its content."""

    first_group: int
    last_group: int
    incarnation: int
    worker: str
    tag: str
    """First 16 hexadecimal digits of the file's digest: the file proves itself without a second file."""

    def __str__(self) -> str:
        groups = f"{number(self.first_group)}-{number(self.last_group)}"
        return f"{groups}.i{number(self.incarnation)}.{self.worker}.{self.tag}.arrow"

    @classmethod
    def parse(cls, text: str) -> TrajectoryName:
        """Inverse of ``str``.

        Raises:
            ValueError: not the name of a trajectory file.
        """
        match = _TRAJECTORY.fullmatch(text)
        if match is None:
            raise ValueError(f"not the name of a trajectory file: {text!r}")
        first, last, incarnation = int(match["first"]), int(match["last"]), int(match["incarnation"])
        if last < first:
            raise ValueError(f"not the name of a trajectory file: {text!r} ends before it begins")
        return cls(first, last, incarnation, match["worker"], match["tag"])


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Paths of one run directory."""

    root: Path

    @property
    def run_record(self) -> Path:
        return self.root / "run.json"

    @property
    def fork(self) -> Path:
        """Of a fork: what was taken over from which run."""
        return self.root / "fork.json"

    @property
    def parent(self) -> Path:
        """Of a fork: copies of the parent's own records, which prove what was taken over."""
        return self.root / "parent"

    @property
    def parent_run_record(self) -> Path:
        return self.parent / "run.json"

    @property
    def parent_recipe(self) -> Path:
        return self.parent / "recipe.yaml"

    @property
    def parent_checkpoint(self) -> Path:
        """The manifest of the parent's checkpoint that the fork began with."""
        return self.parent / "checkpoint.json"

    @property
    def parent_weights(self) -> Path:
        """The manifest of the parent's policy version that the fork began with."""
        return self.parent / "weights.json"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def model(self) -> Path:
        """Configuration and tokenizer of the model (and its starting weights when the run made it)."""
        return self.root / "model"

    @property
    def incarnations(self) -> Path:
        return self.root / "incarnations"

    def incarnation(self, incarnation: int) -> Path:
        return self.incarnations / f"{number(incarnation)}.json"

    def liveness(self, incarnation: int) -> Path:
        """A hint, rewritten every few seconds by a living controller: host, pid, address, a counter."""
        return self.incarnations / f"{number(incarnation)}.alive"

    def stop_request(self, incarnation: int) -> Path:
        """A request to the living controller of this incarnation to stop; a hint, like ``liveness``."""
        return self.incarnations / f"{number(incarnation)}.stop"

    def token(self, incarnation: int) -> Path:
        """The secret by which workers of other jobs join this incarnation; only the owner can read it."""
        return self.incarnations / f"{number(incarnation)}.token"

    @property
    def jobs(self) -> Path:
        """Batch scripts of the run's Slurm jobs, and what they read: resolved recipes and sites."""
        return self.root / "jobs"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    def trajectory(self, name: TrajectoryName | str) -> Path:
        return self.trajectories / str(name)

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def batch(self, step: int) -> Path:
        return self.batches / f"{number(step)}.json"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weights_version(self, version: int) -> Path:
        return self.weights / number(version)

    def weights_manifest(self, version: int) -> Path:
        return self.weights_version(version) / "manifest.json"

    def weights_retirement(self, version: int) -> Path:
        """Says that the version's payload was deleted; beside the manifest, which stays."""
        return self.weights_version(version) / "retired.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / number(step)

    def checkpoint_manifest(self, step: int) -> Path:
        return self.checkpoint(step) / "manifest.json"

    def checkpoint_shards(self, step: int, incarnation: int) -> Path:
        """Directory for the shards; its name carries the incarnation, so that two of them never share files."""
        return self.checkpoint(step) / f"shards.i{number(incarnation)}"

    @property
    def holds(self) -> Path:
        return self.root / "holds"

    def hold(self, name: str) -> Path:
        """A hint, rewritten every few seconds while a reader of old weights lives."""
        return self.holds / f"{name}.json"

    @property
    def inflight(self) -> Path:
        """Unfinished episodes that a stop interrupted; the names are of the same form as those of trajectory files."""
        return self.root / "inflight"

    def unfinished(self, name: TrajectoryName | str) -> Path:
        return self.inflight / str(name)

    @property
    def evaluations(self) -> Path:
        """What policy versions answered to held-out prompts; made by the first evaluation."""
        return self.root / "evaluations"

    def evaluation(self, version: int) -> Path:
        return self.evaluations / number(version)

    def evaluation_record(self, version: int, tag: str) -> Path:
        return self.evaluation(version) / f"{tag}.json"

    @property
    def events(self) -> Path:
        return self.root / "events"

    def event_log(self, process: str, incarnation: int) -> Path:
        return self.events / f"{process}.i{number(incarnation)}.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, process: str, incarnation: int) -> Path:
        return self.logs / f"{process}.i{number(incarnation)}.log"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def mirror(self) -> Path:
        """Only in a directory of pulled weights: it says from where, and that files may be absent."""
        return self.root / "mirror.json"

    @property
    def tracking(self) -> Path:
        """MLflow's SQLite database and artefacts, when no other place is set."""
        return self.root / "tracking"

    def directories(self) -> tuple[Path, ...]:
        """All directories that a new run starts with."""
        return (
            self.model,
            self.incarnations,
            self.trajectories,
            self.batches,
            self.weights,
            self.checkpoints,
            self.holds,
            self.inflight,
            self.events,
            self.jobs,
            self.logs,
            self.quarantine,
        )
