"""What the rows of a decode batch carry between two steps, as tensors: draws, limits and the tokens so far.

Owns: these tensors, filling a row and moving it. Never: runs the model or knows who waits for a row. Invariant: what
belongs to the token at position p of a row (its uniform number, the token drawn, its logprob) lies at the same place of
each buffer, ``row * max_length + p``, where p is the position of the token that is fed in.

Shape legend: S rows at most, T positions at most, K stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from milesbatch.engines.protocol import GenerationRequest
from milesbatch.engines.sampling import DrawRule, response_uniforms

ALL_TOKENS = 2**31
"""``top_k`` of a row that may draw every token: more than any vocabulary."""
NO_TOKEN = -1


class RowState:
    """Per-row tensors; rows 0 .. N-1 are in use, which N is the caller's to know."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self._device = device
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.full((rows,), ALL_TOKENS, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((rows, 1), NO_TOKEN, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(rows, length, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, length, dtype=torch.float32, device=device)
        self._any_sampled = self._any_greedy = self._any_restricted = self._any_stop = False

    def grow(self, length: int) -> None:
        """Make room for ``length`` positions in each row; what is stored stays."""
        for name in ("uniforms", "tokens", "logprobs"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros(old.shape[0], length)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def fill(self, first: int, requests: Sequence[GenerationRequest]) -> None:
        """Prepare rows ``first`` and on for ``requests``; the last token of its context is what each row is fed next."""
        rows = slice(first, first + len(requests))
        samplings = [request.sampling for request in requests]
        starts = [len(request.context_tokens) - 1 for request in requests]
        self.last[rows] = self._put([request.context_tokens[-1] for request in requests], torch.int64)
        self.position[rows] = self._put(starts, torch.int64)
        self.temperature[rows] = self._put([s.temperature or 1.0 for s in samplings], torch.float32)
        self.greedy[rows] = self._put([s.temperature == 0 for s in samplings], torch.bool)
        self.top_p[rows] = self._put([s.top_p for s in samplings], torch.float64)
        self.top_k[rows] = self._put([ALL_TOKENS if s.top_k == -1 else s.top_k for s in samplings], torch.int64)
        self._fill_stop_ids(rows, [s.stop_token_ids for s in samplings])
        uniforms = np.zeros((len(requests), self.uniforms.shape[1]))
        for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
            count, drawn = request.sampling.max_new_tokens, len(request.begun)
            uniforms[row, start : start + count - drawn] = response_uniforms(request.seed, count)[drawn:]
            if drawn:  # a stop text may have begun in them
                self.tokens[first + row, start - drawn : start] = self._put(request.begun, torch.int64)
        self.uniforms[rows] = torch.from_numpy(uniforms).to(self._device)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows ``sources`` over rows ``targets`` (int64, equal sizes)."""
        for state in (
            self.last,
            self.position,
            self.temperature,
            self.greedy,
            self.top_p,
            self.top_k,
            self.stop_ids,
            self.uniforms,
            self.tokens,
            self.logprobs,
        ):
            state.index_copy_(0, targets, state.index_select(0, sources))

    def note_needs(self, requests: Sequence[GenerationRequest]) -> None:
        """Learn which parts of sampling any of the rows in use needs; the others are skipped in every step."""
        samplings = [request.sampling for request in requests]
        self._any_sampled = any(s.temperature > 0 for s in samplings)
        self._any_greedy = any(s.temperature == 0 for s in samplings)
        self._any_restricted = any(s.top_p < 1 or s.top_k != -1 for s in samplings)
        self._any_stop = any(s.stop_token_ids for s in samplings)

    def rule(self, rows: int, places: torch.Tensor) -> DrawRule:
        """How the first ``rows`` rows draw the token at ``places`` (flat index of each row)."""
        restricted = self._any_restricted
        return DrawRule(
            temperature=self.temperature[:rows],
            uniforms=self.uniforms.view(-1).index_select(0, places) if self._any_sampled else None,
            greedy=self.greedy[:rows] if self._any_greedy else None,
            top_p=self.top_p[:rows] if restricted else None,
            top_k=self.top_k[:rows] if restricted else None,
        )

    def record(self, places: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Keep what the first rows drew and make it what they are fed next."""
        rows = len(tokens)
        self.tokens.view(-1).index_copy_(0, places, tokens)
        self.logprobs.view(-1).index_copy_(0, places, logprobs)
        self.last[:rows] = tokens
        self.position[:rows] += 1

    def stopped(self, rows: int) -> list[int]:
        """Those of the first ``rows`` rows whose newest token is one of their stop tokens, ascending."""
        if not self._any_stop:
            return []
        matched = (self.last[:rows, None] == self.stop_ids[:rows]).any(dim=1)
        found: list[int] = matched.nonzero().squeeze(1).tolist()
        return found

    def _put(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _fill_stop_ids(self, rows: slice, stop_ids: Sequence[tuple[int, ...]]) -> None:
        missing = max(map(len, stop_ids)) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, missing), value=NO_TOKEN)
        width = self.stop_ids.shape[1]
        padded = [[*ids, *[NO_TOKEN] * (width - len(ids))] for ids in stop_ids]
        self.stop_ids[rows] = torch.tensor(padded, dtype=torch.int64, device=self._device)
