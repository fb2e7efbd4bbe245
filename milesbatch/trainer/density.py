"""How many elements of the weights an update changed, watched over the run.

Owns the history; warns and never stops anything. An update that does nothing looks like one that works. An optimizer step
whose gradient is not zero should change weights, and about as many of them as the last ones did: at low precision, small
learning rates can be lost to rounding, and a frozen or diverging part of a model shows here first.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from milesbatch.decisions.densities import USUAL_OF, how_odd, usual_share
from milesbatch.records import TensorEntry, WeightsManifest

_NAMES = 5


class DensityWatch:
    """Looks at each new version's manifest; versions that are only compared in a replay count as well."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=USUAL_OF)
        self._of_tensors: dict[str, deque[float]] = {}

    def look(self, manifest: WeightsManifest, *, moved: bool) -> str | None:
        """What is unusual about this version, in words; None when nothing is, or when it is no delta.

        ``moved``: the optimizer's step should have changed something (gradient and learning rate are not zero).
        """
        if manifest.parent is None:
            return None
        entries = manifest.tensors
        share = _share(entries)
        usual = usual_share(self._shares)
        odd = self._odd_tensors(entries)
        self._remember(entries, share)
        if share == 0 and moved:
            names = _some([entry.name for entry in entries])
            return f"no element of {len(entries)} tensors changed ({names}), though the step was not zero"
        if usual is None or how_odd(share, usual) is None:
            return None
        return f"{share:.3%} of the elements changed, usually {usual:.3%}; most unlike before: {_some(odd)}"

    def _odd_tensors(self, entries: tuple[TensorEntry, ...]) -> list[str]:
        """Names, those first whose share is the furthest from their own usual one."""
        distances = []
        for entry in entries:
            history = self._of_tensors.get(entry.name)
            usual = statistics.median(history) if history else 0.0
            tiny = 1.0 / max(1, math.prod(entry.shape))
            distances.append((-abs(math.log((_share((entry,)) + tiny) / (usual + tiny))), entry.name))
        return [name for _, name in sorted(distances)]

    def _remember(self, entries: tuple[TensorEntry, ...], share: float) -> None:
        self._shares.append(share)
        for entry in entries:
            self._of_tensors.setdefault(entry.name, deque(maxlen=USUAL_OF)).append(_share((entry,)))


def _share(entries: tuple[TensorEntry, ...]) -> float:
    elements = sum(math.prod(entry.shape) for entry in entries)
    return sum(entry.changed for entry in entries) / max(1, elements)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
