"""Making a run directory: freeze the recipe, and commit ``run.json``, which is the moment at which the run exists.

Crash states: killed before ``run.json`` is committed, the directory holds a recipe and perhaps model files, and the same
command makes them again; nothing refers to them. Killed after it: the run exists and is continued.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from milesbatch.errors import InputError, RunHeldError, RunMismatchError
from milesbatch.recipe.load import dump_recipe, recipe_digest
from milesbatch.recipe.models import Recipe
from milesbatch.records import RunRecord
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    file_ref,
    is_residue,
    make_directory,
    publish_file,
    read_optional,
    remove_file,
)
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_fork
from milesbatch.store.sight import refresh


def lay_out(layout: RunLayout, recipe: Recipe) -> None:
    """Make the directories and write the frozen recipe.

    Raises:
        InputError: the directory holds something else than a run.
        StorageError: it cannot be written.
    """
    known = {path.name for path in layout.directories()} | {
        layout.fork.name,
        layout.parent.name,
        "recipe.yaml",
        "run.json",
        "tracking",
        layout.evaluations.name,
    }
    strangers = sorted(p.name for p in layout.root.iterdir() if p.name not in known) if layout.root.is_dir() else []
    strangers = [name for name in strangers if not name.startswith(".")]
    if layout.root.exists() and not layout.root.is_dir():
        raise InputError(f"{layout.root} is a file", mend="give a directory with --run-dir")
    if strangers:
        raise InputError(
            f"{layout.root} is not empty and is not a run: it holds {', '.join(strangers[:5])}",
            mend="give a new or empty directory with --run-dir",
        )
    _refuse_headless(layout)
    for directory in layout.directories():
        make_directory(directory)
    refresh(layout.root)  # this host may have found run.json missing before it was made
    if layout.run_record.exists():
        raise _made_by_another(layout)
    text = dump_recipe(recipe).encode()
    try:
        publish_file(layout.recipe, text)
    except AlreadyExistsError:
        remove_file(layout.recipe)  # left by a start that died before its run existed
        publish_file(layout.recipe, text)


def _refuse_headless(layout: RunLayout) -> None:
    """A directory with a run's artefacts but without its ``run.json`` is a damaged run, not the beginning of one."""
    places: tuple[Path, ...] = (layout.incarnations, layout.batches, layout.trajectories)
    if not layout.fork.exists():  # a fork begins with weights and a checkpoint
        places += (layout.weights, layout.checkpoints)
    left = sorted(
        path.relative_to(layout.root)
        for place in places
        if place.is_dir()
        for path in place.iterdir()
        if not is_residue(path.name)
    )
    if left:
        raise RunMismatchError(
            f"{layout.root} holds the files of a run ({left[0]} and {len(left) - 1} more), but its run.json is missing",
            mend="put run.json back from a copy, or give another directory with --run-dir; nothing was touched",
            unseen=layout.run_record,
        )


def commit_run(layout: RunLayout, recipe: Recipe, fingerprints: Mapping[str, str]) -> RunRecord:
    """Commit ``run.json`` over everything that is in place now.

    Of a fork it also says which state of which run this is.

    Raises:
        RunHeldError: another start is making a run of another recipe in the same directory.
        RunMismatchError: it is a fork, and its model is not that of the parent any more.
        StorageError: nothing was committed.
    """
    if layout.recipe.read_bytes() != dump_recipe(recipe).encode():
        raise RunHeldError(
            f"another process is making a run of another recipe in {layout.root}",
            mend="end one of the two, or give another directory with --run-dir",
        )
    payload = [layout.recipe, *_model_files(layout)]
    fork = read_fork(layout)
    if fork is not None:
        _check_model(layout, fingerprints)
        payload += [layout.fork, *(layout.root / ref.path for ref in fork.files if ref.path.startswith("parent/"))]
    record = RunRecord(
        run_id=f"{recipe.name}-{secrets.token_hex(4)}",
        name=recipe.name,
        recipe_digest=recipe_digest(recipe),
        created_at=utc_now(),
        fingerprints=dict(fingerprints),
        files=tuple(file_ref(path, name=_relative(layout, path)) for path in payload),
        forked_from=None if fork is None else fork.forked_from,
    )
    try:
        create_exclusively(layout.run_record, record.to_bytes())
    except AlreadyExistsError:
        raise _made_by_another(layout) from None
    return record


def _check_model(layout: RunLayout, fingerprints: Mapping[str, str]) -> None:
    """The weights of a pretrained model lie elsewhere, and may have changed since the parent began with them."""
    path = layout.parent_run_record
    parent = RunRecord.from_bytes(read_optional(path) or b"", str(path)).fingerprints
    for name in ("model", "tokenizer", "chat_template"):
        if fingerprints.get(name) != parent.get(name):
            raise RunMismatchError(
                f"the {name} is {fingerprints.get(name)}; the run that {layout.root} was forked from has {parent.get(name)}",
                mend="put back what the parent was started with: a fork keeps its model and tokenizer",
            )


def _made_by_another(layout: RunLayout) -> RunHeldError:
    return RunHeldError(
        f"another process has made a run in {layout.root} at the same time",
        mend="watch it with `milesbatch status`; the same command continues it when it has ended",
        unseen=layout.run_record,
    )


def _model_files(layout: RunLayout) -> list[Path]:
    """Without what a start that died left behind: it goes sooner or later, so the record must not name it."""
    files = (path for path in layout.model.rglob("*") if path.is_file())
    return sorted(path for path in files if not is_residue(path.name))


def _relative(layout: RunLayout, path: Path) -> str:
    return str(path.relative_to(layout.root))
