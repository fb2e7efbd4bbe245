"""A relaxed run with long responses is stopped in the middle of them, and goes on with every token that it had."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from command import Command, digests, events, fates, kill, status, wait_until

from milesbatch.audit.prove import audit_run
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.inflight_reader import read_inflight
from milesbatch.trajectories.inflight_schema import BegunSample
from milesbatch.trajectories.reader import iterate_files, read_trajectories
from milesbatch.trajectories.trajectory import Trajectory

RECIPE = """
name: long
seed: 3
steps: 2
determinism: relaxed
model: {kind: made, hidden_size: 64, max_length: 2048, warm_start: {steps: 0}}
data: {kind: arithmetic, operations: "+", max_operand: 9}
environment: {reward: "odd_reward:score"}
rollout:
  workers: 2
  samples_per_group: 2
  groups_per_lease: 2
  staleness: 3
  sampling: {max_new_tokens: 2000, temperature: 0.02}
  max_concurrent_samples: 4
trainer: {ranks: 1, groups_per_step: 4}
tracking: {kind: none}
"""
REWARD = "def score(prompt, response):\n    return sum(map(ord, response)) % 7 / 7\n"
Key = tuple[int, int]


@dataclass
class Place:
    """A directory with the recipe, its reward function, and the run."""

    root: Path
    cache: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run)

    def start(self, faults: Path | None = None) -> Command:
        recipe = self.root / "long.yaml"
        recipe.write_text(RECIPE)
        (self.root / "odd_reward.py").write_text(REWARD)
        return Command("run", recipe, "--run-dir", self.run, cache=self.cache, path=self.root, faults=faults)

    def saved(self) -> dict[Key, BegunSample]:
        files = [read_inflight(path) for path in sorted(self.layout.inflight.glob("*.arrow"))]
        return {(s.group_id, s.sample_index): s for file in files for s in file.samples}

    def recorded(self) -> dict[Key, Trajectory]:
        files = [read_trajectories(path) for path in iterate_files(self.layout)]
        return {(t.group_id, t.sample_index): t for file in files for t in file}


def test_every_token_that_was_drawn_is_in_the_end(cache: Path, tmp_path: Path) -> None:
    """Told to stop, workers save what is begun; the first one is killed just after it has. A block takes longer than it takes
    until they hear of the stop."""
    place = Place(tmp_path, cache)
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{name: saved, role: rollout, point: rollout.saved, action: kill}]\n")
    command = place.start(faults=plan)
    wait_until(lambda: list((place.run / "trajectories").glob("*.arrow")), "the first of four blocks is made")
    kill(command.process.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 75, ended.err
    assert (place.run / "events" / "fault.saved.fired").exists()
    saved = place.saved()
    assert saved and {s.lives[-1].incarnation for s in saved.values()} == {1}
    assert status(place.run, cache)["unfinished_saved"] == len([s for s in saved.values() if s.finish_reason is None])
    assert audit_run(place.layout).ok

    ended = place.start().wait()
    assert ended.code == 0, ended.err
    assert "files of unfinished episodes" in ended.err
    recorded = place.recorded()
    for key, begun in saved.items():
        whole = recorded[key]
        first = whole.prompt_tokens
        assert whole.tokens[first : first + len(begun.tokens)] == begun.tokens
        assert whole.logprobs[first : first + len(begun.tokens)] == begun.logprobs
        assert whole.env["continued_from"] == [{"incarnation": 1, "tokens": len(begun.tokens)}]
        assert whole.incarnation == 2 and whole.started == begun.started
    assert any(len(begun.tokens) + 100 < recorded[key].response_tokens for key, begun in saved.items())
    continued = [e for name in ("rollout-0", "rollout-1") for e in events(place.run, name, "episodes_continued")]
    assert sum(e["tokens"] for e in continued) == sum(len(begun.tokens) for begun in saved.values())
    assert len(set(digests(place.run))) == 3, "the weights have changed with each step"
    assert list(place.layout.inflight.iterdir()) == []
    verdict = audit_run(place.layout)
    assert verdict.ok and not verdict.notes, verdict
    assert fates(place.run).keys() >= {group for group, _ in saved}, "they are trained on, not only generated"
    assert all(fate.startswith("trained") for fate in fates(place.run).values())
