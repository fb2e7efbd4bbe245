"""The samples that the page shows, with their texts.

Owns: how many of each kind. Never: the choice (``analysis/choose.py``), colours or layout. Invariant: a sample that cannot be
read is told and left out. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from milesbatch.analysis.choose import Choice, choose
from milesbatch.analysis.listing import read_samples
from milesbatch.decisions.fates import Fate
from milesbatch.errors import MilesbatchError
from milesbatch.report.page.experience import Experience
from milesbatch.trajectories.trajectory import Trajectory

_MOST_ODD = 6
_EARLY = 2
"""Of the first step, beside those of the last ones."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample with its texts, and why it is shown."""

    choice: Choice
    fate: Fate | None
    trajectory: Trajectory

    @property
    def fate_text(self) -> str:
        """What became of its group."""
        if self.fate is None:
            return "without a fate"
        return f"{'trained' if self.fate.reason is None else 'rejected'} in step {self.fate.step}"

    @property
    def lag_text(self) -> str:
        """Policy versions that wrote it."""
        versions = [span.version for span in self.trajectory.versions]
        if not versions:
            return "no policy version"
        return f"version {versions[0]}" if versions[0] == versions[-1] else f"versions {versions[0]} to {versions[-1]}"

    def to_json(self) -> dict[str, Any]:
        """What a person reads of it, without its tokens."""
        t = self.trajectory
        return {
            "kind": self.choice.kind,
            "why": self.choice.why,
            "fate": self.fate_text,
            "step": self.choice.step,
            "group_id": t.group_id,
            "sample_index": t.sample_index,
            "prompt_id": t.prompt_id,
            "messages": [{"role": m.role, "content": m.content, "tool_calls": m.tool_calls} for m in t.messages],
            "reward": t.reward,
            "rewards": dict(t.rewards),
            "finish_reason": t.finish_reason,
            "error": t.error,
            "versions": self.lag_text,
            "response_tokens": t.response_tokens,
            "worker": t.worker,
        }


def read_chosen(experience: Experience, gaps: list[str]) -> list[Shown]:
    """The chosen samples; what cannot be read is told in ``gaps`` and left out."""
    return list(_read(experience, gaps))


def _read(experience: Experience, gaps: list[str]) -> Iterator[Shown]:
    if experience.counted is None:
        return
    for choice in choose(experience.candidates, best=1, median=1, worst=1, odd=_MOST_ODD, is_late=True, early=_EARLY):
        try:
            ((trajectory, fate),) = read_samples(experience.counted, [(choice.group_id, choice.sample_index)])
        except MilesbatchError as error:
            gaps.append(error.what)
            continue
        yield Shown(choice, fate, trajectory)
