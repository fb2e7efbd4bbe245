"""Which rank computes which sample, and in which forward pass. Pure but for the last function, which makes tensors.

It never drops or splits a sample. Invariant: every rank gets the same number of microbatches (empty ones where there is
too little), because each forward and backward pass of a sharded model is a collective of all ranks.

A microbatch is a rectangle of rows. A row holds one or more whole samples end to end; attention is causal within a
sample and blocked between samples, so a packed sample has the logprobs it would have alone. Rows as long as the longest
sample (rather than one row with everything) keep the attention matrix small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from milesbatch.algorithm.samples import TrainSample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples of one forward pass: ``rows`` of at most ``row_tokens`` tokens each. No rows: a pass that counts nothing."""

    row_tokens: int
    rows: tuple[tuple[TrainSample, ...], ...]

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        """All samples, row by row."""
        return tuple(sample for row in self.rows for sample in row)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.row_tokens * len(self.rows)


EMPTY = Microbatch(row_tokens=1, rows=())


def plan_microbatches(
    samples: Sequence[TrainSample], ranks: int, max_tokens: int
) -> tuple[tuple[Microbatch, ...], ...]:
    """Microbatches of each rank: at least one each, the same number for all, each of at most ``max_tokens`` tokens.

    A sample longer than ``max_tokens`` has a microbatch of its own. The result does not depend on the order of ``samples``.

    Raises:
        ValueError: two samples have the same group and sample index, or a limit is below 1.
    """
    if ranks < 1 or max_tokens < 1:
        raise ValueError(f"ranks ({ranks}) and max_tokens ({max_tokens}) must be at least 1")
    keys = {sample.key for sample in samples}
    if len(keys) != len(samples):
        raise ValueError(f"{len(samples)} samples have only {len(keys)} distinct (group, sample) keys")
    packed = [_pack(share, max_tokens) for share in _distribute(samples, ranks)]
    count = max(1, *(len(microbatches) for microbatches in packed))
    return tuple((*microbatches, *[EMPTY] * (count - len(microbatches))) for microbatches in packed)


def _longest_first(samples: Sequence[TrainSample]) -> list[TrainSample]:
    return sorted(samples, key=lambda sample: (-sample.num_tokens, sample.key))


def _distribute(samples: Sequence[TrainSample], ranks: int) -> list[list[TrainSample]]:
    """Longest first, always to the rank with the fewest tokens (the lowest rank among equals)."""
    shares: list[list[TrainSample]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in _longest_first(samples):
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += sample.num_tokens
    return shares


class _Open:
    """A microbatch that is being filled; its first, longest sample sets the length of its rows."""

    def __init__(self, sample: TrainSample, max_tokens: int) -> None:
        self.row_tokens = sample.num_tokens
        self.max_rows = max(1, max_tokens // self.row_tokens)
        self.rows: list[list[TrainSample]] = [[sample]]
        self.free = [0]

    def takes(self, sample: TrainSample) -> bool:
        for row, free in enumerate(self.free):
            if sample.num_tokens <= free:
                self.rows[row].append(sample)
                self.free[row] -= sample.num_tokens
                return True
        if len(self.rows) == self.max_rows:
            return False
        self.rows.append([sample])
        self.free.append(self.row_tokens - sample.num_tokens)
        return True


def _pack(samples: Sequence[TrainSample], max_tokens: int) -> list[Microbatch]:
    """First fit, longest first: the microbatch that needs most memory comes first and fails first, if one does."""
    opened: list[_Open] = []
    for sample in _longest_first(samples):
        if not any(microbatch.takes(sample) for microbatch in opened):
            opened.append(_Open(sample, max_tokens))
    return [Microbatch(one.row_tokens, tuple(tuple(row) for row in one.rows)) for one in opened]


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """A microbatch as tensors: R rows of L positions, N loss tokens among them, K columns whose logits are needed.

    The flat [N] tensors list the loss tokens row by row, left to right; a token is predicted one position to its left.
    """

    input_ids: torch.Tensor
    """[R, L] int64, 0 where padded."""
    position_ids: torch.Tensor
    """[R, L] int64, from 0 in each sample."""
    segment_ids: torch.Tensor
    """[R, L] int64: 0, 1, … by sample within its row; -1 where padded."""
    attention_mask: torch.Tensor
    """[R, 1, L, L] bool, true where the query (third axis) may look at the key (fourth): same segment, not later."""
    loss_mask: torch.Tensor
    """[R, L] bool, true at loss tokens."""
    columns: torch.Tensor
    """[K] int64, ascending, never empty: positions at which some row predicts a loss token."""
    predict_row: torch.Tensor
    """[N] int64: row of each loss token."""
    predict_column: torch.Tensor
    """[N] int64: index into ``columns`` of the position that predicts it."""
    targets: torch.Tensor
    """[N] int64: the loss tokens."""
    rollout_logprobs: torch.Tensor
    """[N] float32."""
    advantages: torch.Tensor
    """[N] float32: the sample's advantage at each of its tokens."""
    temperatures: torch.Tensor
    """[N] float32, 1 where the sample was greedy."""


def to_tensors(microbatch: Microbatch, device: torch.device) -> PackedTensors:
    """Tensors of a microbatch on ``device``. An empty one becomes a single padded token with no loss."""
    import torch

    shape = (max(1, len(microbatch.rows)), microbatch.row_tokens)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    segment_ids = torch.full(shape, -1, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    token_values = torch.zeros((3, *shape), dtype=torch.float32)
    for row, samples in enumerate(microbatch.rows):
        start = 0
        for segment, sample in enumerate(samples):
            place = slice(start, start + sample.num_tokens)
            input_ids[row, place] = torch.tensor(sample.tokens, dtype=torch.int64)
            position_ids[row, place] = torch.arange(sample.num_tokens)
            segment_ids[row, place] = segment
            loss_mask[row, place] = torch.tensor(sample.loss_mask)
            token_values[0, row, place] = torch.tensor(sample.rollout_logprobs, dtype=torch.float32)
            token_values[1, row, place] = sample.advantage
            token_values[2, row, place] = sample.temperature or 1.0
            start = place.stop
    causal = torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal
    rows, positions = loss_mask.nonzero(as_tuple=True)
    columns = torch.unique(positions - 1) if len(positions) else torch.zeros(1, dtype=torch.int64)
    logprobs, advantages, temperatures = token_values[:, rows, positions]
    return PackedTensors(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        segment_ids=segment_ids.to(device),
        attention_mask=mask[:, None].to(device),
        loss_mask=loss_mask.to(device),
        columns=columns.to(device),
        predict_row=rows.to(device),
        predict_column=torch.searchsorted(columns, positions - 1).to(device),
        targets=input_ids[rows, positions].to(device),
        rollout_logprobs=logprobs.to(device),
        advantages=advantages.to(device),
        temperatures=temperatures.to(device),
    )
