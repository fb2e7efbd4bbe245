"""Which token ids a run's model has, as its own ``config.json`` says. Imports without torch.

Owns: that number, and the comparison with it. Never: reads weights, or a tokenizer: a tokenizer may have fewer tokens than the
model has rows. Invariant: where the model does not say it, nothing is refused. The page behind it is
``docs/format-trajectories.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from milesbatch.trajectories.trajectory import Trajectory


def vocabulary_of(model: Path) -> int | None:
    """Rows of the embedding of the model in this directory; None where it does not say so."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever needs the model says what is wrong with it
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def check_vocabulary(trajectories: Iterable[Trajectory], vocabulary: int | None) -> None:
    """Return only when the model has all tokens; the least is checked by :meth:`Trajectory.validate`.

    Raises:
        ValueError: it has not; names group, sample, place and token.
    """
    if vocabulary is None:
        return
    for trajectory in trajectories:
        if max(trajectory.tokens, default=0) >= vocabulary:
            place, token = next((at, one) for at, one in enumerate(trajectory.tokens) if one >= vocabulary)
            raise ValueError(
                f"trajectory of group {trajectory.group_id}, sample {trajectory.sample_index}: tokens[{place}] is {token}, "
                f"and the model has token ids 0 .. {vocabulary - 1}"
            )
