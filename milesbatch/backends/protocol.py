"""What every trainer backend does, whatever shards the model. Importing it needs no torch.

A backend owns the model's parameters, the optimizer and the collectives between the ranks of the trainer group. It never
touches the run directory and never decides what is trained: that is the training loop's. Invariant: every method marked
*collective* is called by all ranks, in the same order, with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from milesbatch.algorithm.samples import TrainSample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one train step did; identical on all ranks. Means are over loss tokens of the whole step (0 without any)."""

    step: int
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    kl: float | None
    """Estimated KL to the starting model in nats; None when no reference model is kept."""
    entropy: float
    """Nats, at the sampling temperature."""
    clip_share: float
    """Share of tokens whose gradient the clip removed."""
    ratio_mean: float
    ratio_max: float
    """Probability under the trained weights over probability at the rollout."""
    logprob_difference_mean: float
    logprob_difference_max: float
    """Absolute difference of trainer's and rollout's logprob of a token, before the step's update."""
    samples: int
    tokens: int
    """Prompt and response tokens."""
    loss_tokens: int
    microbatches: int
    """Forward passes of one rank."""
    seconds: float
    """Of the slowest rank."""


def do_nothing() -> None:
    """Nobody is copying the state."""


class TrainerBackend(Protocol):
    """One rank's part of the trainer group."""

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""

    def train_step(
        self, step: int, samples: Sequence[TrainSample], before_update: Callable[[], None] = do_nothing
    ) -> StepMetrics:
        """Make one optimizer step on all of ``samples`` (collective); afterwards the policy version is ``step``.

        Every rank gets the whole list and computes its share. No samples: a step with zero gradients, so that
        version and step stay equal.

        ``before_update`` is called once the gradients are there, and before anything that ``state_dict`` gives is changed:
        until it returns, that state may be being copied.

        Raises:
            RunFailedError: the gradient is not finite; weights and optimizer are as before.
            ValueError: ``step`` is outside the recipe's steps, or two samples have the same key.
        """

    def logprobs(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """Logprobs of each sample under the current weights (collective): float32 [T] on the CPU, 0 where masked out."""

    def named_weights(
        self, dtype: torch.dtype, owners: Mapping[str, int] | None = None, *, on_device: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in a fixed order (collective; every rank must exhaust it).

        Names are those of Hugging Face; tensors are contiguous copies on the CPU in ``dtype``, one alive at a time.
        Tied parameters appear once (see ``tied_names``). With ``owners`` (name -> rank) a rank gets only what it owns, and
        never holds another tensor whole. With ``on_device`` the copies are on :attr:`device`, and may be read in any of its
        streams once the iteration has ended.
        """

    def weight_sizes(self) -> Mapping[str, int]:
        """Elements of each tensor that ``named_weights`` gives; the same on all ranks."""

    def tied_names(self) -> dict[str, str]:
        """Names left out by ``named_weights`` -> the name that holds the same parameter."""

    def state_dict(self) -> dict[str, Any]:
        """Live model, optimizer and random state of this rank, for a distributed checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, after a checkpoint was loaded into it.

        Raises:
            CorruptArtefactError: keys are missing or unknown; nothing was changed.
        """
