"""The rows that are being decoded together: admit, step, release. No threads.

Owns: the forward passes and the order of the rows. Never: waits, or touches weights. Invariant: rows in use are 0 .. N-1
without holes, and their order and tensors are a pure function of the calls made so far; so are the bits of the result,
for the same weights and number of threads.

A prompt (with what was begun of the response) is prefilled without its last token. That token is fed by the next decoding
step, together with the newest tokens of the running rows: every token is drawn by the same code, and siblings with one
prompt share its prefill.
Refilling between two steps is the iteration-level scheduling of Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from milesbatch.engines.kv_cache import SlotCache
from milesbatch.engines.protocol import Completion, FinishReason, GenerationRequest
from milesbatch.engines.row_state import RowState
from milesbatch.engines.sampling import draw_tokens
from milesbatch.errors import ModelError, RunFailedError
from milesbatch.ids import VersionSpan

Detokenizer = Callable[[Sequence[int]], str]

_FIRST_LENGTH = 128
"""Positions that a row has room for at first; more are made when a request needs them."""
_LENGTH_STEP = 16
"""Attended lengths are multiples of this, so that views and kernels are reused from step to step."""
_PREFILL_TOKENS = 8192
"""Padded prompt tokens of one prefill forward; bounds its memory."""
_TAIL_MARGIN = 8
"""Extra tokens decoded before a possible stop text: tokens without text, and spaces that start a text, hide there."""


@dataclass(slots=True, eq=False)
class Row:
    """One running request."""

    request: GenerationRequest
    future: Future[Completion]
    started: int = 0
    """Number of the step that drew its first token."""
    spans: list[VersionSpan] = field(default_factory=list)


Finished = tuple[Row, Completion]


class DecodeBatch:
    """Rows decoded together by one model.

    Raises:
        ModelError: the model's attention cannot be driven with this cache, or its context is shorter than ``max_length``.
    """

    def __init__(self, model: Any, *, max_length: int, max_rows: int, stop_text: Detokenizer | None) -> None:
        _check_model(model, max_length)
        device, dtype, config = model.device, model.dtype, model.config
        heads = config.num_attention_heads
        self._model = model
        self._stop_text = stop_text
        self._max_length = max_length
        self._max_rows = max_rows
        self._cache = SlotCache(
            layers=config.num_hidden_layers,
            rows=max_rows,
            length=min(max_length, _FIRST_LENGTH),
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        )
        # The name of the argument changed within transformers 5.
        named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._model_options = {named: self._cache, "use_cache": True, "logits_to_keep": 1}
        self._additive_mask = config._attn_implementation == "eager"
        self._capacity = min(max_length, _FIRST_LENGTH)
        self._state = RowState(max_rows, self._capacity, device)
        self._row_starts = self._cache.row_starts(max_rows)
        self._columns = torch.arange(max_length, device=device)
        self._rows: list[Row] = []
        self._steps = 0
        self._longest = 0
        self._next_full = 0
        self._any_stop_text = False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def free(self) -> int:
        """Rows that may still be admitted."""
        return self._max_rows - len(self._rows)

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row], version: int) -> None:
        """Add at most ``free`` rows, in order, and prefill their prompts."""
        first = len(self._rows)
        for row in rows:
            row.started = self._steps
            row.spans = [VersionSpan(0, version)]
        self._make_room(rows)
        self._rows.extend(rows)
        self._state.fill(first, [row.request for row in rows])
        while first < len(self._rows):
            first = self._prefill_from(first)
        self._note_rows()

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Storage follows the longest request seen: a long context that nobody uses must not cost its memory."""
        needed = max((len(r.request.prompt_tokens) + r.request.sampling.max_new_tokens for r in rows), default=0)
        if needed > self._capacity:
            self._capacity = min(self._max_length, max(2 * self._capacity, needed))
            self._cache.grow(self._capacity)
            self._state.grow(self._capacity)
            self._row_starts = self._cache.row_starts(self._max_rows)

    def mark_version(self, version: int) -> None:
        """Note that all tokens from the next step on are drawn under ``version``."""
        for row in self._rows:
            start = self._steps - row.started
            if row.spans[-1].start == start:
                row.spans.pop()
            row.spans.append(VersionSpan(start, version))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Draw one token for every row; return and release the rows that ended with it.

        Raises:
            RunFailedError: the model's logits are not finite.
        """
        count = len(self._rows)
        position = self._state.position[:count]
        places = self._row_starts[:count] + position
        length = min(self._capacity, -(-self._longest // _LENGTH_STEP) * _LENGTH_STEP)
        self._cache.begin_decode(places, length)
        mask = (self._columns[:length] <= position[:, None])[:, None, None]
        logits = self._forward(self._state.last[:count, None], position[:, None], mask)
        tokens, logprobs = draw_tokens(logits[:, -1], self._state.rule(count, places))
        self._state.record(places, tokens, logprobs)
        self._steps += 1
        self._longest += 1
        return self._release(self._ended())

    def abort(self) -> list[Finished]:
        """Release all rows as they are."""
        return self._release(dict.fromkeys(range(len(self._rows)), "abort"))

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _prefill_from(self, first: int) -> int:
        """Prefill rows from ``first`` on, as many as one forward holds; return the first row that is still to do."""
        distinct: dict[tuple[int, ...], int] = {}
        source: list[int] = []
        longest = 0
        for row in self._rows[first:]:
            fed = row.request.context_tokens[:-1]
            padded = max(longest, len(fed)) * (len(distinct) + (fed not in distinct))
            if source and padded > _PREFILL_TOKENS:
                break
            source.append(distinct.setdefault(fed, len(distinct)))
            longest = max(longest, len(fed))
        if longest:
            device = self._columns.device
            self._cache.begin_prefill(slice(first, first + len(source)), torch.tensor(source, device=device))
            ids = torch.tensor([[*fed, *[0] * (longest - len(fed))] for fed in distinct], device=device)
            columns = self._columns[:longest]
            # Padding is on the right: a causal mask keeps it from everything that matters.
            mask = (columns <= columns[:, None])[None, None]
            self._forward(ids, columns[None].expand(len(distinct), -1), mask)
        return first + len(source)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._additive_mask:
            blocked = torch.zeros(mask.shape, dtype=self._model.dtype, device=mask.device)
            mask = blocked.masked_fill_(~mask, torch.finfo(blocked.dtype).min)
        output = self._model(input_ids=ids, position_ids=positions, attention_mask=mask, **self._model_options)
        logits: torch.Tensor = output.logits
        return logits

    # -- the end of rows ----------------------------------------------------------------------------------------------

    def _ended(self) -> dict[int, FinishReason]:
        ended: dict[int, FinishReason] = {}
        if self._steps >= self._next_full:
            full = (i for i, row in enumerate(self._rows) if self._generated(row) >= row.request.tokens_left)
            ended.update(dict.fromkeys(full, "length"))
        ended.update(dict.fromkeys(self._state.stopped(len(self._rows)), "stop"))
        if self._any_stop_text:
            ended.update(dict.fromkeys(self._stopped_by_text(), "stop"))
        return ended

    def _stopped_by_text(self) -> list[int]:
        assert self._stop_text is not None
        stopped = []
        for index, row in enumerate(self._rows):
            stop = row.request.sampling.stop
            if stop:
                start = len(row.request.prompt_tokens) - 1
                end = start + len(row.request.begun) + self._generated(row)
                # A token is at least a byte of text, so a stop text reaches back at most its bytes.
                reach = max(len(text.encode()) for text in stop) + _TAIL_MARGIN
                text = self._stop_text(self._state.tokens[index, max(start, end - reach) : end].tolist())
                if any(wanted in text for wanted in stop):
                    stopped.append(index)
        return stopped

    @torch.inference_mode()
    def _release(self, ended: dict[int, FinishReason]) -> list[Finished]:
        if not ended:
            return []
        finished = [(self._rows[index], self._completion(index, ended[index])) for index in sorted(ended)]
        remaining = len(self._rows) - len(ended)
        holes = [index for index in sorted(ended) if index < remaining]
        movers = [index for index in range(remaining, len(self._rows)) if index not in ended]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        if holes:
            device = self._columns.device
            sources, targets = torch.tensor(movers, device=device), torch.tensor(holes, device=device)
            self._cache.move(sources, targets, min(self._longest, self._capacity))
            self._state.move(sources, targets)
        del self._rows[remaining:]
        self._note_rows()
        return finished

    def _completion(self, index: int, reason: FinishReason) -> Completion:
        row = self._rows[index]
        start = len(row.request.context_tokens) - 1
        drawn = slice(start, start + self._generated(row))
        tokens: list[int] = self._state.tokens[index, drawn].tolist()
        logprobs: list[float] = self._state.logprobs[index, drawn].tolist()
        if not all(map(math.isfinite, logprobs)):
            raise RunFailedError(
                f"the model's logits are not finite under policy version {row.spans[-1].version}",
                mend="training has probably diverged: look at the loss and the gradient norm of the last steps",
            )
        spans = tuple(span for span in row.spans if span.start < len(tokens))
        return Completion(tuple(tokens), tuple(logprobs), reason, spans)

    def _generated(self, row: Row) -> int:
        return self._steps - row.started

    def _note_rows(self) -> None:
        """Renew what is known about all rows together, so that steps need not look at each."""
        requests = [row.request for row in self._rows]
        self._state.note_needs(requests)
        self._any_stop_text = any(request.sampling.stop for request in requests)
        # Positions that the next step attends over, and the first step after which a row is full.
        self._longest = max((len(row.request.context_tokens) + self._generated(row) for row in self._rows), default=0)
        self._next_full = min((row.started + row.request.tokens_left for row in self._rows), default=0)


def _check_model(model: Any, max_length: int) -> None:
    config = model.config
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"the embedded engine cannot drive attention {attention!r}",
            mend="load the model with attn_implementation='sdpa' (or 'eager')",
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and max_length > context:
        raise ModelError(
            f"max_length {max_length} is more than the model's context of {context}", mend=f"use at most {context}"
        )
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if sliding and window is not None and window < max_length:
        raise ModelError(
            f"the model's sliding attention window of {window} is shorter than max_length {max_length}",
            mend=f"use max_length {window} or less, or a model with full attention",
        )
