"""Which requests an engine takes. Pure; no torch.

Owns: the limits of a request. Never: repairs one. Invariant: a request that passes cannot fail later for a reason that
was visible here, so that one bad request never ends the decoding of its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from milesbatch.engines.protocol import GenerationRequest, SamplingParams


def check_requests(
    requests: Sequence[GenerationRequest], *, max_length: int, vocab_size: int, has_detokenizer: bool
) -> None:
    """Accept all of ``requests`` or say what is wrong with the first bad one.

    Raises:
        ValueError: names the request's place in the call, the value, and what is allowed.
    """
    for place, request in enumerate(requests):
        problem = _length_problem(request, max_length) or _sampling_problem(request.sampling)
        if problem is None and not (min(request.context_tokens) >= 0 and max(request.context_tokens) < vocab_size):
            problem = f"its prompt, or what was begun, has token ids outside 0 .. {vocab_size - 1}"
        if problem is None and request.sampling.stop and not has_detokenizer:
            problem = f"stop texts {request.sampling.stop} need an engine that was given a detokenizer (stop_text)"
        if problem is not None:
            raise ValueError(f"request {place} of {len(requests)} cannot be generated: {problem}; none was queued")


def _length_problem(request: GenerationRequest, max_length: int) -> str | None:
    prompt, new = len(request.prompt_tokens), request.sampling.max_new_tokens
    if prompt < 1:
        return "its prompt is empty; at least one token is needed"
    if new < 1:
        return f"max_new_tokens is {new}; at least 1 is needed"
    if prompt + new > max_length:
        return f"prompt of {prompt} tokens and max_new_tokens {new} are more than the context of {max_length}"
    if request.tokens_left < 1:
        return f"{len(request.begun)} tokens were begun, and max_new_tokens is {new}; at least one must be left to draw"
    return None


def _sampling_problem(sampling: SamplingParams) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; 0 (greedy) or a positive number is allowed"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; above 0 and up to 1 is allowed"
    if sampling.top_k != -1 and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}; -1 (all) or at least 1 is allowed"
    if any(not text for text in sampling.stop):
        return "an empty stop text would end every response at once"
    return None
