"""``--fork`` of ``run`` and ``submit``: which directories are meant, and the new run's beginning.

Owns the options' meaning, the same for both commands; never the making (``milesbatch/forks``). The page behind it is
``docs/forks.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.errors import UsageError
from milesbatch.recipe.models import Recipe
from milesbatch.store.layout import RunLayout

ForkOption = Annotated[
    Path | None,
    typer.Option(
        "--fork",
        metavar="NEW_RUN",
        help="Go on in a new run directory from the run's newest checkpoint, with this recipe; the run itself stays as it is.",
        show_default=False,
    ),
]
ForkStepOption = Annotated[
    int | None,
    typer.Option("--fork-step", min=0, help="With --fork: from the checkpoint of this step.", show_default=False),
]


def place_of(run_dir: Path | None, base: Path, name: str) -> Path:
    """The run directory: the one that was given, or ``name`` under ``base``."""
    return run_dir if run_dir is not None else base / name


def begin_fork(
    place: Path,
    is_given: bool,
    new: Path | None,
    step: int | None,
    wanted: Recipe,
    say: Callable[[str], None],
    only_look: bool = False,
) -> Path:
    """The directory to run in: ``place``, or with ``--fork`` the new one, which on return has its beginning.

    With ``only_look`` nothing is made: it is checked and said what it would begin with.
    A bare name is looked for beside the parent, unless the parent was given as a path (``is_given``).

    Raises:
        UsageError: ``--fork-step`` without ``--fork``. MilesbatchError: see :func:`milesbatch.forks.make.fork`.
    """
    if new is None:
        if step is not None:
            raise UsageError("--fork-step was given without --fork", mend="give --fork NEW_RUN, or leave both out")
        return place
    from milesbatch.forks.make import Fork, foresee, fork

    target = place.parent / new if not is_given and new.name == str(new) else new
    asked = Fork(RunLayout(place), str(place), RunLayout(target), step)
    if only_look:
        foresee(asked, wanted, say)
    else:
        fork(asked, wanted, say)
    return target
