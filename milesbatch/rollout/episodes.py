"""Episodes: from a lease to generation requests, and from completions to trajectories. No files, no HTTP.

Every draw is decided by (run seed, group, sample), so an episode that is run again under the same weights in the same
batch gives the same trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from milesbatch.decisions.seeds import derive_seed
from milesbatch.engines.protocol import Completion, GenerationRequest, SamplingParams
from milesbatch.environments.judge import Judge, Judgement
from milesbatch.environments.prompts import Prompt, encode_prompt
from milesbatch.ids import VersionSpan
from milesbatch.recipe.models import PretrainedModel, Recipe, Sampling
from milesbatch.trajectories.inflight_schema import BegunSample
from milesbatch.trajectories.trajectory import Message, Trajectory


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample to be generated."""

    group_id: int
    sample_index: int
    prompt: Prompt
    request: GenerationRequest
    begun: BegunSample | None = None
    """What earlier incarnations drew of it; ``request`` goes on after that."""

    @property
    def is_finished(self) -> bool:
        """Was it generated to its end by an earlier incarnation, and not recorded?"""
        return self.begun is not None and self.begun.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Recorder:
    """Who records: goes into every trajectory."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How often each prompt is asked, how its answers are drawn, and from which of the recipe's seeds."""

    samples_per_group: int
    sampling: Sampling
    seeds: str
    """Name of the seeds: those of different names are unrelated."""

    @classmethod
    def of_training(cls, recipe: Recipe) -> EpisodeRules:
        return cls(recipe.rollout.samples_per_group, recipe.rollout.sampling, "sample")


class Prompts(Protocol):
    """What is asked, by group."""

    def prompt(self, group_id: int) -> Prompt: ...


class EpisodeRunner:
    """Turns groups into requests and completions into judged trajectories."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: Prompts,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        recorder: Recorder,
        rules: EpisodeRules | None = None,
    ) -> None:
        """``rules`` are those of training where none are given."""
        self._recipe = recipe
        self._rules = rules or EpisodeRules.of_training(recipe)
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._judge = Judge(recipe.environment.reward)
        self._recorder = recorder
        sampling = self._rules.sampling
        self._sampling = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=stop_token_ids,
            stop=sampling.stop,
        )

    def episodes(self, groups: Sequence[int]) -> list[Episode]:
        """All samples of ``groups``, in order of group and sample."""
        episodes = []
        for group_id in groups:
            prompt = self._prompts.prompt(group_id)
            tokens = encode_prompt(self._tokenizer, self._recipe.model, prompt)
            for index in range(self._rules.samples_per_group):
                seed = derive_seed(self._recipe.seed, self._rules.seeds, group_id, index)
                request = GenerationRequest(tokens, self._sampling, seed)
                episodes.append(Episode(group_id, index, prompt, request))
        return episodes

    def record(
        self,
        episodes: Sequence[Episode],
        completions: Sequence[Completion],
        digests: Mapping[int, str],
        started: datetime,
        ended: datetime,
    ) -> list[Trajectory]:
        """Judge the whole responses and make the trajectories; ``digests`` maps policy versions to their weights digests."""
        texts = [self._text(completion) for completion in completions]
        judgements = self._judge.judge_all([(e.prompt, text) for e, text in zip(episodes, texts, strict=True)])
        return [
            self._trajectory(episode, completion, text, judgement, digests, started, ended)
            for episode, completion, text, judgement in zip(episodes, completions, texts, judgements, strict=True)
        ]

    def _text(self, completion: Completion) -> str:
        return str(self._tokenizer.decode(list(completion.tokens), skip_special_tokens=True))

    def _trajectory(
        self,
        episode: Episode,
        completion: Completion,
        text: str,
        judgement: Judgement,
        digests: Mapping[int, str],
        started: datetime,
        ended: datetime,
    ) -> Trajectory:
        prompt, response = episode.request.prompt_tokens, completion.tokens
        newest = completion.versions[-1].version if completion.versions else None
        messages = [Message(m.role, m.content) for m in episode.prompt.messages]
        model = self._recipe.model
        if isinstance(model, PretrainedModel) and model.system_prompt is not None:
            messages.insert(0, Message("system", model.system_prompt))
        return Trajectory(
            group_id=episode.group_id,
            sample_index=episode.sample_index,
            prompt_id=episode.prompt.prompt_id,
            messages=(*messages, Message("assistant", text)),
            tokens=(*prompt, *response),
            loss_mask=(False,) * len(prompt) + (True,) * len(response),
            logprobs=(0.0,) * len(prompt) + completion.logprobs,
            versions=tuple(VersionSpan(span.start + len(prompt), span.version) for span in completion.versions),
            weights_digest="" if newest is None else digests[newest],
            reward=judgement.reward,
            rewards=judgement.parts,
            finish_reason=completion.finish_reason,
            turns=1,
            seed=episode.request.seed,
            worker=self._recorder.worker,
            incarnation=self._recorder.incarnation,
            started=started if episode.begun is None else episode.begun.started,
            ended=ended,
            prompt_tokens=len(prompt),
            response_tokens=len(response),
            error=judgement.error,
            routed_experts=None if completion.experts is None else completion.experts.entries(),
            env={"answer": episode.prompt.answer, **episode.prompt.env, **_continued_from(episode)},
        )


def _continued_from(episode: Episode) -> dict[str, Any]:
    """Which earlier incarnations drew the beginning of the response, and up to which of its tokens."""
    if episode.begun is None:
        return {}
    return {
        "continued_from": [{"incarnation": life.incarnation, "tokens": life.tokens} for life in episode.begun.lives]
    }
