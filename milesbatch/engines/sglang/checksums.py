"""What a server must answer when it is asked for the checksums of its weights.

Owns: how SGLang's parameters are put together from the tensors of a policy version, and hashed. Never: asks a server.
Invariant: a parameter is taken as proven only when its hash was computed here from verified bytes, and compared.

SGLang stacks matrices that are applied to the same input (``q_proj``, ``k_proj``, ``v_proj`` become ``qkv_proj``),
experts too, and pads the vocabulary, on the CPU also the inner width of an MLP. On the CPU it hashes a parameter's bytes
with SHA-256, of which it tells the first 8 bytes. For parameters that are laid out otherwise (shards of tensor parallelism,
GPUs, where the hash is another one) there is no expectation, and a server is compared with its siblings instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from milesbatch.errors import EngineError

_STACKED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
_EXPERTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("w13_weight", ("gate_proj", "up_proj")),
    ("w2_weight", ("down_proj",)),
)
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_INNER_ROWS, _INNER_COLUMNS = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)
_VOCABULARY_STEP = 64
_INNER_STEP = 32


@dataclass(frozen=True, slots=True)
class Proof:
    """What comparing has shown."""

    proven: int
    """Parameters whose hash was computed here from verified bytes, and is the server's."""
    agreed: int
    """Parameters without an expectation: compared with those of the other servers only."""


def checksums_of(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Of each rank of a server the hash of each parameter, as ``/weights_checker`` answered.

    Raises:
        EngineError: it answered something else.
    """
    ranks = answer.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise EngineError("the server told no checksums")
    found: list[dict[str, str]] = []
    for number, rank in enumerate(ranks):
        checksums = rank.get("checksums") if isinstance(rank, dict) else None
        if (
            not isinstance(checksums, dict)
            or not checksums
            or not all(isinstance(one, str) for one in checksums.values())
        ):
            raise EngineError(f"the server's rank {number} told something that is no checksums of parameters")
        found.append(dict(checksums))
    return found


def compare(
    answered: Mapping[str, str], tensors: Mapping[str, torch.Tensor], *, can_expect: bool, others: Mapping[str, str]
) -> Proof:
    """Compare a server's checksums (parameter -> hash) with what ``tensors`` make, and with another server's, if there
    is one.

    ``can_expect``: whole parameters, hashed as on the CPU.

    Raises:
        EngineError: they differ, or a parameter was not told; names it.
    """
    if not answered:
        raise EngineError("the server told no checksums")
    sources = {name: stacked for name in answered if can_expect and (stacked := _sources(name, tensors)) is not None}
    unused = set(tensors) - {source for stacked in sources.values() for source in stacked}
    unused -= {name for name in unused if name == "lm_head.weight" and "lm_head.weight" not in answered}
    if can_expect and unused:  # servers say nothing of weights that they do not know by name
        raise EngineError(f"the server does not say that it has {min(unused)}")
    unknown = {name for name in answered if name not in sources} if can_expect else set()
    if unknown:
        raise EngineError(f"the server has {min(unknown)}, which is made of no tensor of the policy version")
    for name, found in answered.items():
        expected = (
            _hash({source: tensors[source] for source in sources[name]}) if name in sources else others.get(name, found)
        )
        if found != expected:
            raise EngineError(f"the server's {name} has checksum {found}; the policy version's is {expected}")
    return Proof(len(sources), len(answered) - len(sources))


def _sources(name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...] | None:
    """Tensors of the policy version that make up SGLang's parameter ``name``, in order; None when that is not known."""
    if name in tensors:
        return (name,)
    for stacked, parts in _STACKED:
        if f".{stacked}." in name:
            found = tuple(name.replace(f".{stacked}.", f".{part}.") for part in parts)
            return found if all(part in tensors for part in found) else None
    for suffix, parts in _EXPERTS:
        prefix, is_experts, _ = name.partition(f".experts.{suffix}")
        if is_experts:
            experts: list[list[str]] = []
            while all(f"{prefix}.experts.{len(experts)}.{part}.weight" in tensors for part in parts):
                experts.append([f"{prefix}.experts.{len(experts)}.{part}.weight" for part in parts])
            return tuple(source for expert in experts for source in expert) or None
    return None


def _hash(parts: Mapping[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, part in parts.items():
        hasher.update(_padded(name, part.detach()).contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.digest()[:8].hex()


def _padded(name: str, part: torch.Tensor) -> torch.Tensor:
    """A tensor with as many rows, or columns, of zeros as a server adds."""
    if name.endswith(_PADDED):
        rows, columns = -part.shape[0] % _VOCABULARY_STEP, 0
    else:
        rows = -part.shape[0] % _INNER_STEP if name.endswith(_INNER_ROWS) else 0
        columns = -part.shape[1] % _INNER_STEP if name.endswith(_INNER_COLUMNS) else 0
    return torch.nn.functional.pad(part, (0, columns, 0, rows)) if rows or columns else part
