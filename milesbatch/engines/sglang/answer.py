"""One answer of a server, read with distrust: what comes out is whole, or nothing comes out. Pure; no HTTP, no torch.

Owns: which answers to ``/generate`` are believed. Never: what becomes of their tokens (``response.py``), or of a server that
gives others (``engine.py``). Invariant: whatever JSON an answer holds, reading it gives an :class:`Answer` or raises
:class:`ServerGoneError`, and nothing else. The page behind it is ``docs/sglang.md``, "Requests".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from milesbatch.engines.sglang.client import ServerGoneError
from milesbatch.ids import VersionSpan
from milesbatch.trajectories.experts import RoutedExperts
from milesbatch.trajectories.trajectory import is_logprob

_REASONS = frozenset(("stop", "length", "abort"))
_MOST_COUNT = 2**31


class ForeignWeightsError(ServerGoneError):
    """Tokens were drawn under weights that this engine did not give to the server: somebody else did."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server drew, as it said."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    """In order, the first from token 0; empty only when there are no tokens."""
    reason: str
    cached_tokens: int
    prompt_tokens: int
    was_put_back: bool
    routed_experts: Any
    """As it came: see :meth:`experts`."""

    def experts(self, count: int, shape: tuple[int, int]) -> RoutedExperts | None:
        """``count`` rows of layers and experts; None for an aborted request that a server had put back: it has let go of
        them.

        Raises:
            ServerGoneError: others, or none.
        """
        text = self.routed_experts
        if text is None and self.reason == "abort":
            return None
        try:
            numbers = np.frombuffer(base64.b64decode(text or "", validate=True), "<i4")
            return RoutedExperts.of(numbers.reshape(count, *shape))
        except (ValueError, TypeError, binascii.Error) as error:
            raise _not_whole(f"its routed experts are not {count} rows: {error}") from error


def read_answer(body: Mapping[str, Any], most: int, vocab_size: int, versions: Mapping[str, int]) -> Answer:
    """The answer to a request for at most ``most`` tokens. ``versions``: names of weights that this engine gave to servers
    -> policy version.

    Raises:
        ForeignWeightsError: it was drawn under others.
        ServerGoneError: it is not whole.
    """
    meta = body.get("meta_info")
    if not isinstance(meta, dict):
        raise _lacks("meta_info", meta)
    reason = _reason_of(meta)
    tokens = _tokens_of(body, vocab_size)
    logprobs = _logprobs_of(meta, tokens)
    if len(tokens) > most:
        raise _not_whole(f"{len(tokens)} tokens came where {most} were asked for")
    if not tokens and reason != "abort":
        raise _not_whole(f"no token came, and it ended with {reason}")
    return Answer(
        tokens,
        logprobs,
        _spans_of(meta, len(tokens), versions) if tokens else [],
        reason,
        _count_of(meta, "cached_tokens"),
        _count_of(meta, "prompt_tokens"),
        bool(meta.get("num_retractions")),
        meta.get("routed_experts"),
    )


def _reason_of(meta: Mapping[str, Any]) -> str:
    stated = meta.get("finish_reason")
    reason = stated.get("type") if isinstance(stated, dict) else None
    if not isinstance(reason, str):
        raise _lacks("finish_reason", stated)
    if reason not in _REASONS:
        raise _not_whole(f"it ended with {_shown(reason)}, which is none of {', '.join(sorted(_REASONS))}")
    return reason


def _tokens_of(body: Mapping[str, Any], vocab_size: int) -> list[int]:
    stated = body.get("output_ids")
    if not isinstance(stated, list):
        raise _lacks("output_ids", stated)
    for token in stated:
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise _not_whole(f"{_shown(token)} is no token id; the model has 0 .. {vocab_size - 1}")
    return list(stated)


def _logprobs_of(meta: Mapping[str, Any], tokens: list[int]) -> list[float]:
    stated = meta.get("output_token_logprobs")
    if stated is None and not tokens:
        return []
    if not isinstance(stated, list):
        raise _lacks("output_token_logprobs", stated)
    logprobs: list[float] = []
    for entry in stated:
        if not isinstance(entry, list) or len(entry) < 2 or not _is_int(entry[1]):
            raise _lacks("logprob and token in output_token_logprobs", entry)
        logprob = entry[0]
        if not isinstance(logprob, float) and not _is_int(logprob):
            raise _lacks("logprob in output_token_logprobs", logprob)
        if not is_logprob(logprob):
            raise _not_whole(f"{_shown(logprob)} is not the logarithm of a probability of a token that was drawn")
        logprobs.append(float(logprob))
    if [entry[1] for entry in stated] != tokens:
        raise _not_whole(f"{len(tokens)} tokens came with logprobs of {len(stated)}, or of others")
    return logprobs


def _spans_of(meta: Mapping[str, Any], count: int, versions: Mapping[str, int]) -> list[VersionSpan]:
    stated = meta.get("weight_versions")
    if stated is None:  # servers of before tell the last version only
        return [VersionSpan(0, _version_of(meta.get("weight_version"), versions))]
    if not isinstance(stated, list):
        raise _lacks("weight_versions", stated)
    spans: list[VersionSpan] = []
    end = 0
    for entry in stated:
        if not isinstance(entry, dict) or not _is_int(entry.get("start")) or not _is_int(entry.get("end")):
            raise _lacks("start and end in weight_versions", entry)
        if entry["start"] != end or not end <= entry["end"] <= count:
            raise _not_whole(f"its weight_versions do not follow one another over {count} tokens: {_shown(stated)}")
        version = _version_of(entry.get("version"), versions)
        if entry["end"] == end:
            continue
        if spans and version < spans[-1].version:
            raise _not_whole(f"policy version {version} comes after {spans[-1].version}")
        end = entry["end"]
        spans.append(VersionSpan(entry["start"], version))
    if end != count:
        raise _not_whole(f"its weight_versions are those of {end} tokens, and {count} came")
    return spans


def _version_of(name: Any, versions: Mapping[str, int]) -> int:
    if not isinstance(name, str):
        raise _lacks("the name of a weight version", name)
    if name not in versions:
        raise ForeignWeightsError(
            f"an answer is not whole: it was drawn under weights {_shown(name)}, which were not activated here; "
            "somebody else changes this server's weights, or it was started again"
        )
    return versions[name]


def _count_of(meta: Mapping[str, Any], key: str) -> int:
    """Requests that were aborted before they began have none."""
    count = meta.get(key)
    if count is None:
        return 0
    if not _is_int(count) or not 0 <= count < _MOST_COUNT:
        raise _lacks(key, count)
    return int(count)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lacks(what: str, found: Any) -> ServerGoneError:
    return ServerGoneError(f"an answer lacks what it must have: {what}, found {_shown(found)}")


def _not_whole(problem: str) -> ServerGoneError:
    return ServerGoneError(f"an answer is not whole: {problem}")


def _shown(value: Any) -> str:
    """Values of strangers may be long, and integers too long to be written."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
