"""One draw for each row: distribution, support, ties, greedy rows, rounding at the ends."""

from __future__ import annotations

import numpy as np
import torch

from milesbatch.engines.row_state import ALL_TOKENS
from milesbatch.engines.sampling import DrawRule, draw_tokens, response_uniforms, support


def rule(rows: int, uniforms: torch.Tensor | None, **fields: torch.Tensor) -> DrawRule:
    return DrawRule(
        temperature=fields.get("temperature", torch.ones(rows)),
        uniforms=uniforms,
        greedy=fields.get("greedy"),
        top_p=fields.get("top_p"),
        top_k=fields.get("top_k"),
    )


def test_uniforms_depend_on_seed_and_place_only() -> None:
    assert np.array_equal(response_uniforms(3, 40)[:7], response_uniforms(3, 7))
    assert not np.array_equal(response_uniforms(3, 7), response_uniforms(4, 7))
    assert np.array_equal(response_uniforms(-1, 5), response_uniforms(2**64 - 1, 5))


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    rows = 20_000
    uniforms = torch.from_numpy(response_uniforms(0, rows))
    temperature = torch.full((rows,), 2.0)
    tokens, logprobs = draw_tokens(logits.expand(rows, -1), rule(rows, uniforms, temperature=temperature))
    expected = torch.softmax(logits / 2.0, dim=-1)
    shares = torch.bincount(tokens, minlength=4) / rows
    assert torch.allclose(shares, expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_every_uniform_number_gives_a_token_that_can_happen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf])
    uniforms = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits.expand(4, -1), rule(4, uniforms))
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs.isfinite().all()


def test_greedy_rows_among_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    uniforms = torch.tensor([0.0, 0.0], dtype=torch.float64)
    tokens, _ = draw_tokens(logits, rule(2, uniforms, greedy=torch.tensor([True, False])))
    assert tokens.tolist() == [1, 0]
    tokens, logprobs = draw_tokens(logits, rule(2, None))
    assert tokens.tolist() == [1, 1]
    assert torch.allclose(logprobs, torch.log_softmax(logits, dim=-1)[:, 1])


def test_support_per_row() -> None:
    probs = torch.tensor([0.1, 0.4, 0.3, 0.2])
    top_p = torch.tensor([1.0, 1.0, 0.69, 0.71, 1e-9, 0.5], dtype=torch.float64)
    top_k = torch.tensor([ALL_TOKENS, 2, ALL_TOKENS, ALL_TOKENS, ALL_TOKENS, 3])
    kept = [row.nonzero().squeeze(1).tolist() for row in support(probs.expand(6, -1), top_p, top_k)]
    # Last row: of the three likeliest (0.9 together), 0.4 is less than half and 0.7 is more.
    assert kept == [[0, 1, 2, 3], [1, 2], [1, 2], [1, 2, 3], [1], [1, 2]]


def test_p_of_one_keeps_tokens_that_the_running_sum_cannot_see() -> None:
    probs = torch.tensor([[1.0, 1e-20]] * 2)
    kept = support(probs, torch.tensor([1.0, 0.9999], dtype=torch.float64), torch.tensor([ALL_TOKENS] * 2))
    assert kept.tolist() == [[True, True], [True, False]]


def test_the_largest_uniform_number_stays_inside_any_total() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2000, 37)
    logits[:, -5:] = -torch.inf
    uniforms = torch.full((2000,), 1 - 2**-53, dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, rule(2000, uniforms))
    assert set(tokens.tolist()) == {31}
    assert logprobs.isfinite().all()


def test_ties_at_the_edge_go_to_the_smaller_token() -> None:
    kept = support(torch.full((1, 5), 0.2), torch.ones(1, dtype=torch.float64), torch.tensor([2]))
    assert kept.tolist() == [[True, True, False, False, False]]


def test_restriction_leaves_the_recorded_logprob_alone() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    fields = {"top_p": torch.tensor([1.0], dtype=torch.float64), "top_k": torch.tensor([1])}
    tokens, logprobs = draw_tokens(logits, rule(1, torch.tensor([0.0], dtype=torch.float64), **fields))
    assert tokens.tolist() == [2]
    assert torch.allclose(logprobs, torch.log_softmax(logits, dim=-1)[:, 2])


def test_an_unrestricted_row_draws_the_same_beside_a_restricted_one() -> None:
    torch.manual_seed(0)
    logits, uniforms = torch.randn(64, 50), torch.rand(64, dtype=torch.float64)
    alone, _ = draw_tokens(logits, rule(64, uniforms))
    top_k = torch.where(torch.arange(64) % 2 == 0, ALL_TOKENS, 3)
    mixed, _ = draw_tokens(logits, rule(64, uniforms, top_p=torch.ones(64, dtype=torch.float64), top_k=top_k))
    assert torch.equal(alone[::2], mixed[::2])
    assert not torch.equal(alone[1::2], mixed[1::2])


def test_logits_that_are_not_finite_give_a_token_in_range() -> None:
    tokens, logprobs = draw_tokens(torch.full((1, 4), torch.nan), rule(1, torch.tensor([0.5], dtype=torch.float64)))
    assert 0 <= int(tokens) < 4
    assert not logprobs.isfinite().any()
