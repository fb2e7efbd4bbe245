"""How other tools call the tensors of a run's model, for commands that write model files.

Invariant: what is written has names that servers know, or is refused. A server leaves experts that it does not find under their
names as they are, at random, and does not say so. torch is imported for mixtures of experts alone.
"""

from __future__ import annotations

import json
from typing import Any

from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout
from milesbatch.weights.materialize import InFiles

_COUNTS = ("num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts")
"""Keys of configurations that tell of experts."""


def in_files(layout: RunLayout) -> InFiles | None:
    """What renames the tensors of the run's versions; None where they have these names already.

    Raises:
        InputError: the model is a mixture of experts, and there is no torch.
        ModelError: its configuration cannot be read.
    """
    if not _has_experts(layout):
        return None
    try:
        from milesbatch.models.experts import FileNames
    except ModuleNotFoundError as error:
        raise InputError(
            f"the model of {layout.root} is a mixture of experts, whose files are written with torch: {error}",
            mend="give this command where torch is installed, as on the nodes that train",
        ) from error
    names = FileNames.of_model(layout.model)
    return names.of_raw if names.differ else None


def refuse_other_names(layout: RunLayout, what: str) -> None:
    """Return when the run's tensors have the names that files have.

    Raises:
        InputError, ModelError: they have not, or as :func:`in_files` says.
    """
    if in_files(layout) is not None:
        raise InputError(
            f"{what} holds tensors as the trainer names them, and the experts of {layout.root} are not what servers look for:"
            " they would serve random ones",
            mend="write whole versions, in which each expert has its own tensors, with `milesbatch weights materialize`",
        )


def _has_experts(layout: RunLayout) -> bool:
    try:
        config: Any = json.loads((layout.model / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # whoever needs it says so
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    return any(isinstance(part, dict) and part.get(key) for part in parts for key in _COUNTS)
