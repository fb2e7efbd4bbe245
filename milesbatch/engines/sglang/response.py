"""One response in the making: what servers answered so far, and whether it has ended. Pure; no HTTP, no torch.

Owns: the meaning of lengths and stops, the same as in the embedded engine whatever a server makes of them. Never: which
answers are believed (``answer.py``). Invariant: every token that is kept came from a server together with its logprob and
a policy version that this engine has activated, versions ascending; an answer that is not so is refused as a whole, and
nothing of it is kept.

A response may take several answers: after its server died, after a pause that aborts, after a server stopped where
nobody asked it to. Each goes on after the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milesbatch.engines.protocol import Completion, FinishReason, GenerationRequest
from milesbatch.engines.sglang.answer import Answer, read_answer
from milesbatch.engines.sglang.client import ServerGoneError
from milesbatch.ids import VersionSpan
from milesbatch.trajectories.experts import RoutedExperts, width_of

_TAIL_MARGIN = 8
"""As in the embedded engine: tokens without text, and spaces that start a text, hide there."""

Detokenizer = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Response:
    """What is there of the response to one request."""

    request: GenerationRequest
    vocab_size: int
    routed: tuple[int, int] | None = None
    """Layers, and experts of a token in each, of a model whose experts are recorded."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    """Of all its prefills, as its servers counted them."""
    _experts: RoutedExperts | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self.request.tokens_left - len(self.tokens)

    def body(self, rid: str, cache: str, seed: int | None) -> dict[str, Any]:
        """What a server is asked. ``cache`` names the prefix cache that it may share with other requests."""
        sampling = self.request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": self.left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "no_stop_trim": True,
            # Without stop tokens nothing else ends a response: the model's own end token must not.
            "ignore_eos": not sampling.stop_token_ids,
        }
        if sampling.stop_token_ids:
            parameters["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        if seed is not None:
            parameters["sampling_seed"] = seed
        body = {
            "input_ids": [*self.request.context_tokens, *self.tokens],
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "rid": rid,
            "extra_key": cache,
        }
        if self.routed is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self._first_row}
        return body

    @property
    def _first_row(self) -> int:
        """The first token whose experts an answer says: what came before was fed for other answers, under other weights
        maybe."""
        begun = len(self.request.begun) + len(self.tokens)
        return len(self.request.prompt_tokens) + begun - 1 if begun else 0

    def add(
        self, body: Mapping[str, Any], versions: Mapping[str, int], stop_text: Detokenizer | None
    ) -> FinishReason | None:
        """Take in an answer; why the response has ended, or None: it goes on. ``versions``: names of weights that this
        engine gave to servers -> policy version.

        Raises:
            ForeignWeightsError: it was drawn under others; nothing of it was taken.
            ServerGoneError: it is not whole; nothing of it was taken.
        """
        answer = read_answer(body, self.left, self.vocab_size, versions)
        tokens, spans = answer.tokens, answer.spans
        if spans and self.spans and spans[0].version < self.spans[-1].version:
            # Another server, which has not changed yet: what it draws goes on from newer weights' tokens.
            raise ServerGoneError(
                f"an answer is not whole: policy version {spans[0].version} comes after {self.spans[-1].version}"
            )
        if self.routed is not None and tokens:
            self._add_experts(answer)
        self.cached_tokens += answer.cached_tokens
        self.prompt_tokens += answer.prompt_tokens
        before = len(self.tokens)
        for span in spans:
            if not self.spans or self.spans[-1].version != span.version:
                self.spans.append(VersionSpan(span.start + before, span.version))
        self.tokens += tokens
        self.logprobs += answer.logprobs
        stop = self._stop_after(before, stop_text)
        if stop is not None:
            self._cut(stop)
            return "stop"
        return "length" if self.left <= 0 else None

    def completion(self, reason: FinishReason) -> Completion:
        experts = self._experts
        if self.routed is not None:
            length = len(self.request.context_tokens) + len(self.tokens)
            experts = (experts or RoutedExperts.unknown(width_of(*self.routed), length)).first(length)
        return Completion(tuple(self.tokens), tuple(self.logprobs), reason, tuple(self.spans), experts)

    def _add_experts(self, answer: Answer) -> None:
        """Raises:
        ServerGoneError: they are not those of the answer's tokens.
        """
        assert self.routed is not None
        start, before = self._first_row, len(self.request.context_tokens) + len(self.tokens)
        length, spans = before + len(answer.tokens), answer.spans
        rows = answer.experts(length - 1 - start, self.routed)
        if rows is not None and len(spans) > 1 and answer.was_put_back:
            # What was put back is computed again under the weights of then: those rows are not what tokens were drawn by.
            again = before + spans[-1].start - 1 - start
            rows = RoutedExperts.unknown(rows.width, again).then(again, rows.last(len(rows) - again), len(rows))
        experts = self._experts or RoutedExperts(width_of(*self.routed), b"")
        self._experts = experts.then(start, rows, length)

    def _stop_after(self, before: int, stop_text: Detokenizer | None) -> int | None:
        """Number of tokens up to and with the one that ends the response, among those from ``before`` on."""
        sampling = self.request.sampling
        begun = len(self.request.begun)
        whole = [*self.request.begun, *self.tokens] if sampling.stop else []
        reach = max((len(text.encode()) for text in sampling.stop), default=0) + _TAIL_MARGIN
        for place in range(before, len(self.tokens)):
            if self.tokens[place] in sampling.stop_token_ids:
                return place + 1
            if sampling.stop and stop_text is not None:
                end = begun + place + 1
                text = stop_text(whole[max(0, end - reach) : end])
                if any(wanted in text for wanted in sampling.stop):
                    return place + 1
        return None

    def _cut(self, count: int) -> None:
        del self.tokens[count:], self.logprobs[count:]
        self.spans = [span for span in self.spans if span.start < count]
