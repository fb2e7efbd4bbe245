"""What changed from version to version: densities by kind of tensor and by layer, from manifests alone.

Owns the kinds of tensors, the sums, and which versions stand out. Never reads payload and proves nothing (the audit does): a
manifest that cannot be read costs its own version. *Density* is the share of elements whose bits differ from the version
before; a version without a delta has none. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.decisions.densities import FAR_OFF, USUAL_OF, how_odd, usual_share
from milesbatch.errors import MilesbatchError
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import committed_versions

OTHER = "other"
_MOST_NAMES = 5
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("embed", r"(^|\.)(embed\w*|word_embeddings|tok_embeddings|wte|wpe)\."),
        ("lm_head", r"(^|\.)(lm_head|embed_out)\."),
        ("norm", r"(^|[._])(\w*norm\d?|ln_\w+)(\.|$)"),
        ("qkv_proj", r"\.(qkv_proj|query_key_value|c_attn)\."),
        ("q_proj", r"\.(q|q_a|q_b)_proj"),
        ("k_proj", r"\.k_proj\."),
        ("v_proj", r"\.v_proj\."),
        ("kv_proj", r"\.kv_[ab]_proj"),
        ("o_proj", r"\.(o_proj|out_proj|dense)\.(weight|bias)|\.attn\.c_proj\."),
        ("router", r"\.(router|mlp\.gate|block_sparse_moe\.gate)\."),
        ("experts.gate_proj", r"\.experts\..*\b(gate_proj|w1)\b"),
        ("experts.up_proj", r"\.experts\..*\b(up_proj|w3)\b"),
        ("experts.down_proj", r"\.experts\..*\b(down_proj|w2)\b"),
        ("mlp.gate_up_proj", r"\.gate_up_proj\."),
        ("mlp.gate_proj", r"\.gate_proj\."),
        ("mlp.up_proj", r"\.(up_proj|c_fc|fc1|dense_h_to_4h)\."),
        ("mlp.down_proj", r"\.(down_proj|fc2|dense_4h_to_h)\.|\.mlp\.c_proj\."),
    )
)
KINDS = (*(kind for kind, _ in _KINDS), OTHER)


def kind_of(name: str) -> str:
    """Kind of a tensor by its name; ``other`` for a name that says none."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)


def layer_of(name: str) -> int | None:
    """Number of the layer that a tensor is of; None for one of no layer."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class Moments:
    """Densities of a group of tensors over versions."""

    first: float
    first_version: int
    last: float
    last_version: int
    mean: float
    max: float
    max_version: int


@dataclass(slots=True)
class Group:
    """Tensors of one kind or layer. ``density`` has one entry for each version."""

    name: str
    tensors: int = 0
    elements: int = 0
    changed: int = 0
    """Over all versions with a delta."""
    density: list[float | None] = field(default_factory=list)

    def moments(self, versions: Sequence[int]) -> Moments | None:
        """None when no version has a delta."""
        known = [(value, version) for value, version in zip(self.density, versions, strict=True) if value is not None]
        if not known:
            return None
        highest, at = max(known, key=lambda pair: (pair[0], -pair[1]))
        mean = statistics.fmean(value for value, _ in known)
        return Moments(*known[0], *known[-1], mean, highest, at)


@dataclass(frozen=True, slots=True)
class Mark:
    """A version that stands out. ``kind``: ``empty``, ``dense`` or ``sparse``."""

    version: int
    kind: str
    density: float
    usual: float | None
    """Median of the versions before; None when there are too few."""
    tensors: tuple[str, ...]
    """Those that stand out most, at most five; ``others`` more do."""
    others: int


@dataclass(slots=True)
class Changes:
    """All versions that were looked at, ascending; lists have one entry for each."""

    versions: list[int] = field(default_factory=list)
    delta_bytes: list[int | None] = field(default_factory=list)
    keyframe_bytes: list[int | None] = field(default_factory=list)
    encodings: list[dict[str, int]] = field(default_factory=list)
    """Tensors by the encoding in which the delta holds them; empty without one."""
    whole: Group = field(default_factory=lambda: Group("all"))
    kinds: list[Group] = field(default_factory=list)
    layers: list[Group] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """What could not be read, in words."""


def read_changes(layout: RunLayout, most: int | None = None) -> Changes:
    """Look at all committed versions, or at ``most`` of them that lie evenly between the first and the last.

    Raises:
        StorageError: the directory cannot be listed.
    """
    reading = _Reading()
    for version in _some(committed_versions(layout), most):
        path = layout.weights_manifest(version)
        try:
            body = json.loads(read_optional(path) or b"")
            reading.add(version, _Version.parse(body))
        except (MilesbatchError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reading.changes.gaps.append(f"{path.relative_to(layout.root)} cannot be read ({error})")
    return reading.result()


def _some(versions: Sequence[int], most: int | None) -> Sequence[int]:
    if most is None or len(versions) <= most:
        return versions
    places = np.linspace(0, len(versions) - 1, most).round().astype(int)
    return [versions[place] for place in dict.fromkeys(places.tolist())]


@dataclass(frozen=True, slots=True)
class _Version:
    """What counts of a manifest."""

    names: list[str]
    elements: NDArray[np.int64]
    changed: NDArray[np.int64]
    encodings: dict[str, int]
    has_delta: bool
    delta_bytes: int | None
    keyframe_bytes: int | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> _Version:
        tensors, keyframe, has_delta = body["tensors"], body["keyframe"], body["parent"] is not None
        encodings: dict[str, int] = {}
        for tensor in tensors if has_delta else ():
            encodings[str(tensor["encoding"])] = encodings.get(str(tensor["encoding"]), 0) + 1
        sizes = {str(ref["path"]): int(ref["bytes"]) for ref in body["files"]}
        full = (
            None if keyframe is None else sum(sizes.pop(path) for path in (keyframe, *body.get("keyframe_shards", ())))
        )
        return cls(
            names=[str(tensor["name"]) for tensor in tensors],
            elements=np.array([math.prod(tensor["shape"]) for tensor in tensors], np.int64),
            changed=np.array([tensor["changed"] for tensor in tensors], np.int64),
            encodings=encodings,
            has_delta=has_delta,
            delta_bytes=sum(sizes.values()) if has_delta else None,
            keyframe_bytes=full,
        )


class _Reading:
    """Sums up version after version."""

    def __init__(self) -> None:
        self.changes = Changes()
        self._kinds: dict[str, Group] = {}
        self._layers: dict[int, Group] = {}
        self._names: list[str] = []
        self._groups: list[tuple[Group, NDArray[np.intp]]] = []
        self._before: deque[tuple[float, NDArray[np.float64]]] = deque(maxlen=USUAL_OF)

    def add(self, version: int, found: _Version) -> None:
        if found.names != self._names:
            self._regroup(found)
        changes = self.changes
        groups = [(changes.whole, np.arange(len(found.names))), *self._groups]
        changes.versions.append(version)
        changes.delta_bytes.append(found.delta_bytes)
        changes.keyframe_bytes.append(found.keyframe_bytes)
        changes.encodings.append(found.encodings)
        for group, places in groups:
            group.tensors, group.elements = len(places), int(found.elements[places].sum())
            density = None
            if found.has_delta and group.elements:
                changed = int(found.changed[places].sum())
                group.changed += changed
                density = changed / group.elements
            group.density += [None] * (len(changes.versions) - 1 - len(group.density)) + [density]
        if found.has_delta:
            self._mark(version, found)

    def _regroup(self, found: _Version) -> None:
        """Other tensors than before: kinds and layers anew, and no usual density."""
        places: dict[int, tuple[Group, list[int]]] = {}
        for place, name in enumerate(found.names):
            kind, layer = kind_of(name), layer_of(name)
            own = [self._kinds.setdefault(kind, Group(kind))]
            own += [] if layer is None else [self._layers.setdefault(layer, Group(str(layer)))]
            for group in own:
                places.setdefault(id(group), (group, []))[1].append(place)
        self._groups = [(group, np.array(own, np.intp)) for group, own in places.values()]
        self._names = found.names
        self._before.clear()

    def _mark(self, version: int, found: _Version) -> None:
        elements = np.maximum(found.elements, 1)
        densities = found.changed / elements
        total = int(found.elements.sum())
        density = int(found.changed.sum()) / total if total else 0.0
        usual = usual_share([value for value, _ in self._before])
        if density == 0 and total:
            names = [name for name, size in zip(found.names, found.elements, strict=True) if size]
            self.changes.marks.append(Mark(version, "empty", 0.0, usual, *_cut(names)))
        elif (kind := how_odd(density, usual)) is not None:
            names = self._odd(densities, is_dense=kind == "dense")
            self.changes.marks.append(Mark(version, kind, density, usual, *_cut(names)))
        self._before.append((density, densities))

    def _odd(self, densities: NDArray[np.float64], *, is_dense: bool) -> list[str]:
        """Tensors far off their own usual density, those with the largest difference first."""
        usual = np.median(np.array([before for _, before in self._before]), axis=0)
        far = densities > FAR_OFF * usual if is_dense else densities < usual / FAR_OFF
        order = np.argsort(-np.abs(densities - usual), kind="stable")
        return [self._names[place] for place in order if far[place]]

    def result(self) -> Changes:
        changes = self.changes
        changes.kinds = sorted(self._kinds.values(), key=lambda group: KINDS.index(group.name))
        changes.layers = [group for _, group in sorted(self._layers.items())]
        for group in (*changes.kinds, *changes.layers):  # those that later versions do not have
            group.density += [None] * (len(changes.versions) - len(group.density))
        return changes


def _cut(names: Sequence[str]) -> tuple[tuple[str, ...], int]:
    return tuple(names[:_MOST_NAMES]), max(len(names) - _MOST_NAMES, 0)


def mark_in_words(mark: Mark) -> str:
    """One line: what stands out, and which tensors."""
    others = f" and {mark.others:,} more" if mark.others else ""
    names = ", ".join(mark.tensors) + others if mark.tensors else "no tensor by itself"
    if mark.kind == "empty":
        return f"version {mark.version} changed nothing: {names}"
    usual = mark.usual or 0.0
    times = mark.density / usual if mark.kind == "dense" else usual / mark.density
    word = "more" if mark.kind == "dense" else "less"
    return (
        f"version {mark.version} changed {mark.density:.3%}, {times:.1f} times {word} than usual ({usual:.3%}): {names}"
    )


def totals(encodings: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Tensors by encoding over several versions, the most frequent first."""
    sums: dict[str, int] = {}
    for one in encodings:
        for name, count in one.items():
            sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])))
