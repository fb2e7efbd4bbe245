"""Rows of a decode batch, step by step and without threads."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from engine_models import MAX_LENGTH, make_model, request

from milesbatch.engines import decode_batch
from milesbatch.engines.decode_batch import DecodeBatch, Row
from milesbatch.engines.protocol import GenerationRequest, VersionSpan


def make_batch(rows: int = 4) -> DecodeBatch:
    return DecodeBatch(make_model(), max_length=MAX_LENGTH, max_rows=rows, stop_text=None)


def rows_of(*requests: GenerationRequest) -> list[Row]:
    return [Row(one, Future()) for one in requests]


def test_rows_end_at_their_own_length_and_make_room() -> None:
    batch = make_batch()
    batch.admit(rows_of(*(request(salt=n, seed=n, max_new_tokens=n) for n in (3, 1, 2))), version=0)
    assert (len(batch), batch.free) == (3, 1)
    ended = [[row.request.sampling.max_new_tokens for row, _ in batch.step()] for _ in range(3)]
    assert ended == [[1], [2], [3]]
    assert (len(batch), batch.free) == (0, 4)


def test_a_row_admitted_later_starts_its_own_count() -> None:
    batch = make_batch()
    batch.admit(rows_of(request(max_new_tokens=5)), version=0)
    batch.step()
    batch.step()
    late = request(11, salt=2, seed=3, max_new_tokens=3)
    batch.admit(rows_of(late), version=4)
    ended = [finished for _ in range(3) for finished in batch.step()]
    assert [(len(found.tokens), found.versions) for _, found in ended] == [
        (5, (VersionSpan(0, 0),)),
        (3, (VersionSpan(0, 4),)),
    ]


def test_versions_that_drew_no_token_leave_no_span() -> None:
    batch = make_batch()
    batch.admit(rows_of(request(max_new_tokens=4)), version=0)
    batch.mark_version(1)
    batch.step()
    batch.mark_version(2)
    batch.mark_version(3)
    batch.step()
    batch.step()
    ((_, found),) = batch.step()
    assert found.versions == (VersionSpan(0, 1), VersionSpan(1, 3))


def test_abort_gives_what_there_is() -> None:
    batch = make_batch()
    batch.admit(rows_of(request()), version=0)
    batch.step()
    batch.mark_version(1)
    batch.admit(rows_of(request(salt=1)), version=1)
    (_, begun), (_, unstarted) = batch.abort()
    assert (len(begun.tokens), begun.finish_reason, begun.versions) == (1, "abort", (VersionSpan(0, 0),))
    assert (unstarted.tokens, unstarted.logprobs, unstarted.versions) == ((), (), ())
    assert len(batch) == 0


def test_what_lies_beyond_a_row_does_not_reach_it() -> None:
    """A row that follows longer ones in the same memory gives the same bits as in fresh memory."""
    used, fresh = make_batch(), make_batch()
    used.admit(rows_of(*(request(70, salt=n, seed=n, max_new_tokens=20) for n in range(4))), version=0)
    for _ in range(20):
        used.step()
    found = []
    for batch in (used, fresh):
        batch.admit(rows_of(request(4, seed=9), request(9, salt=5, seed=8)), version=0)
        found.append([completion for _ in range(12) for _, completion in batch.step()])
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_the_last_position_of_the_context_is_usable() -> None:
    batch = make_batch()
    batch.admit(
        rows_of(request(MAX_LENGTH - 3, max_new_tokens=3), request(1, max_new_tokens=MAX_LENGTH - 1)), version=0
    )
    lengths = [len(found.tokens) for _ in range(MAX_LENGTH - 1) for _, found in batch.step()]
    assert lengths == [3, MAX_LENGTH - 1]
    assert torch.is_grad_enabled()


def test_room_grows_with_the_longest_request_and_running_rows_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(first_length: int) -> list[tuple[int, ...]]:
        monkeypatch.setattr(decode_batch, "_FIRST_LENGTH", first_length)
        batch = make_batch()
        batch.admit(rows_of(request(5, seed=1, max_new_tokens=6)), version=0)
        batch.step()
        batch.admit(rows_of(request(9, salt=4, seed=2, max_new_tokens=MAX_LENGTH - 9)), version=0)
        ended = {}
        while len(batch):
            ended.update({row.request.seed: found.tokens for row, found in batch.step()})
        return [ended[1], ended[2]]

    grown = tokens(16)
    assert grown == tokens(MAX_LENGTH)
    assert len(grown[1]) == MAX_LENGTH - 9
