"""A run as every process finds it: its record, its recipe as this incarnation runs it. Reads only.

``recipe.yaml`` is frozen when the run is made; an incarnation may run with allowed changes (more steps, another checkpoint
interval …), which its record holds. So the recipe of an incarnation is the frozen one with those changes applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from milesbatch.decisions.origin import Origin, origin_of
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.recipe.freeze import with_changes
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.records import ForkRecord, IncarnationRecord, RunRecord
from milesbatch.store.durable import read_optional, verify_file
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import AT_ONCE, Sight


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A committed run and the recipe that one of its incarnations runs with."""

    layout: RunLayout
    record: RunRecord
    recipe: Recipe


def read_run_record(layout: RunLayout) -> RunRecord | None:
    """The run's record; None when there is no run (yet) in this directory.

    Raises:
        CorruptArtefactError: ``run.json`` is damaged.
    """
    data = read_optional(layout.run_record)
    return None if data is None else RunRecord.from_bytes(data, str(layout.run_record))


def read_fork(layout: RunLayout) -> ForkRecord | None:
    """What was taken over from a parent; None when the directory is no fork.

    Raises:
        CorruptArtefactError: ``fork.json`` is damaged.
    """
    data = read_optional(layout.fork)
    return None if data is None else ForkRecord.from_bytes(data, str(layout.fork))


def read_origin(layout: RunLayout) -> Origin:
    """Where the run in this directory begins; at the starting model when there is no run (yet).

    Raises:
        CorruptArtefactError: ``run.json`` is damaged.
    """
    return origin_of(read_run_record(layout))


def frozen_recipe(layout: RunLayout, record: RunRecord) -> Recipe:
    """The recipe as it was frozen; it and the model's files are verified against ``run.json``.

    Raises:
        CorruptArtefactError: ``recipe.yaml`` or a file under ``model/`` is damaged.
    """
    for ref in record.files:
        try:
            verify_file(layout.root / ref.path, ref)
        except CorruptArtefactError as error:
            mend = "put the file back from a copy of the run; the run cannot go on without it"
            raise CorruptArtefactError(error.what, mend=mend, unseen=error.unseen) from error
    return load_recipe(layout.recipe)


def open_run(layout: RunLayout, incarnation: int, sight: Sight = AT_ONCE) -> OpenRun:
    """The run as ``incarnation`` runs it; ``sight`` is for a process that was told that it does.

    Raises:
        InputError: there is no run in this directory.
        CorruptArtefactError: one of its records is damaged.
    """
    return sight.until_seen(lambda: _open_run(layout, incarnation))


def _open_run(layout: RunLayout, incarnation: int) -> OpenRun:
    record = read_run_record(layout)
    if record is None:
        raise InputError(
            f"{layout.root} is not a run: it has no run.json",
            mend="give the directory of a run",
            unseen=layout.run_record,
        )
    recipe = frozen_recipe(layout, record)
    path = layout.incarnation(incarnation)
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing", mend="run `milesbatch audit` on the run", unseen=path)
    changes = IncarnationRecord.from_bytes(data, str(path)).recipe_changes
    return OpenRun(layout, record, with_changes(recipe, changes))
