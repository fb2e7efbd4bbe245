"""What every rollout engine does, whatever runs the model. No torch.

An engine takes token ids and gives token ids with the logprob of each; text never crosses this boundary. The embedded
engine (:mod:`milesbatch.engines.embedded`) implements it with torch in the worker's own process, the SGLang engine
(:mod:`milesbatch.engines.sglang.engine`) over HTTP with servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from milesbatch.ids import VersionSpan
from milesbatch.trajectories.experts import RoutedExperts

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``stop_token_ids`` and ``stop`` end a response; what matched stays in the tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. ``seed`` decides every draw: same weights, same request, same batch -> same tokens.

    ``begun`` are tokens of the response that were drawn before, by whatever engine. They count towards ``max_new_tokens``,
    stop texts may reach back into them, and the next draw is the one that would have followed: a response that is
    interrupted and continued under the same weights is the one that it would have been. A completion holds what is drawn
    after them.
    """

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    begun: tuple[int, ...] = ()

    @property
    def context_tokens(self) -> tuple[int, ...]:
        """What is there before the first token is drawn."""
        return self.prompt_tokens + self.begun

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be drawn."""
        return self.sampling.max_new_tokens - len(self.begun)


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated response.

    Shapes: ``tokens`` and ``logprobs`` have equal length R; ``logprobs[i]`` is the natural log of
    softmax(logits / temperature) at ``tokens[i]`` (temperature 0 counts as 1 here), untouched by top-p and top-k.
    ``versions`` begin at 0 and ascend. ``experts``, where they are recorded, are of prompt, what was begun, and ``tokens``; of
    what was begun elsewhere nothing is known.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = field(default=())
    experts: RoutedExperts | None = None


class PolicyWeights(Protocol):
    """A verified policy version as the follower holds it: every tensor's digest was compared before this exists."""

    @property
    def version(self) -> int: ...

    @property
    def weights_digest(self) -> str: ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All stored tensors by name (tied aliases left out); they may share memory with the follower, so copy them."""

    def write_model(self, directory: Path) -> None:
        """Write a directory that transformers and servers load: config, tokenizer, safetensors."""


class RolloutEngine(Protocol):
    """One engine, owned by one rollout worker.

    Lifecycle: constructed -> ``activate`` (first weights) -> any mix of ``submit`` and ``activate`` -> ``close``.
    """

    def activate(self, weights: PolicyWeights) -> float:
        """Make ``weights`` the policy, between two decoding steps and without dropping running requests: their later
        tokens carry the new version. Returns the seconds for which decoding was paused. Blocks until done."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue requests together, in order. Requests of one call that find the engine idle are decoded as one fixed
        batch, so that the result is a pure function of (weights, requests).

        Raises:
            ValueError: a request cannot fit (prompt and response longer than the model's context); none was queued.
        """

    @property
    def policy_version(self) -> int:
        """Version that the next token will be drawn under; -1 before the first ``activate``."""

    @property
    def samples_in_flight(self) -> int:
        """Requests queued or running."""

    @property
    def tokens_generated(self) -> int:
        """Tokens since the start; a counter that stands still while samples are in flight means a hang."""

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens that were in a prefix cache, since the start; None where that is not counted."""

    def close(self) -> None:
        """Stop; futures still open end as ``abort`` with the tokens they have."""
