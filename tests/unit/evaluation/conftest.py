"""A run directory with published weights of the engine tests' tiny model, and evaluators for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from evaluation_rig import Rig, make_rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Versions 0, 1 and 2 are published, and one incarnation has begun."""
    made = make_rig(tmp_path, 0, 1, 2)
    yield made
    made.close()


@pytest.fixture
def rig_with(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """The same with changes to the section evaluation."""
    made: list[Rig] = []

    def make(**section: Any) -> Rig:
        made.append(make_rig(tmp_path, 0, 1, 2, **section))
        return made[-1]

    yield make
    for one in made:
        one.close()
