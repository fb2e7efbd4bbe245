"""Making a fork: the parent's state as the beginning of a new run directory.

    choose a state (choose.py), which is held ─> take its files over into a directory beside the new one, each proven by its
      digest ─> fork.json ─> the directory gets its name: the commit ─> a run is made of it as of any other (store/create.py)

Owns the new directory until it has its name. Never changes the parent (but for a hold while it reads). Invariant: under the
new name there is nothing, or the whole state.

Crash states, in order of time:

1. killed before the rename: a directory ``.NAME.fork-…`` beside the new one, which nobody takes for a run. The same command
   chooses anew (the parent may have gone on), makes another one, and removes those whose makers have ended on this host;
2. killed after it: the state is there, without ``run.json``; the same command, or ``run`` on the new directory, makes the run;
3. killed while the run is made: as for any new run, whose model directory and recipe are written again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import CorruptArtefactError, InputError, RunHeldError, RunMismatchError
from milesbatch.forks.choose import Choice, choose, parent_record
from milesbatch.recipe.models import Recipe
from milesbatch.records import FORKED, FileRef, ForkedFrom, ForkRecord, digest_bytes
from milesbatch.store.beginning import read_beginning
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import (
    create_exclusively,
    file_ref,
    make_directory,
    publish_file,
    read_optional,
    remove_tree,
    storage_error,
    sync_names,
)
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import process_started
from milesbatch.store.operations import current
from milesbatch.store.places import refuse_name, true_path
from milesbatch.store.run import read_run_record
from milesbatch.store.taking import take_file

Say = Callable[[str], None]
_TRIES = 3
"""A parent that goes on deletes old checkpoints: what was chosen may be gone before it was taken."""
_MAKER = re.compile(r"\.(?P<name>.+)\.fork-(?P<host>.+)-(?P<pid>[0-9]+)-(?P<start>[0-9a-f]{8})-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Fork:
    """What a person asks for: go on from ``parent`` in ``target``; ``said`` is the parent's path as given."""

    parent: RunLayout
    said: str
    target: RunLayout
    step: int | None = None
    """Of the checkpoint to begin with; None: the newest."""


def fork(asked: Fork, wanted: Recipe, say: Say) -> ForkedFrom:
    """Make the beginning of a run in ``asked.target``, or find that it was made before; says what it begins with.

    Durability: on return it is durable. If killed midway, see the module's crash states.

    Raises:
        InputError: there is nothing to fork, or something else in the way.
        RunMismatchError: ``wanted`` cannot go on from there, or the target is another run.
        CorruptArtefactError: what is to be taken is damaged. StorageError: it cannot be written; nothing has the new name.
    """
    place = _refuse_places(asked)
    if (made := _made_before(asked)) is not None:
        return made
    parent_record(asked.parent)  # before anything is written, there or here
    make_directory(place.parent)
    _remove_left(place, say)
    tries = 1
    while True:
        try:
            with holding(asked.parent, 0, "milesbatch --fork"):
                choice = choose(asked.parent, wanted, asked.step)
                _make(choice, place)
            break
        except CorruptArtefactError as error:
            if error.unseen is None or asked.step is not None or tries == _TRIES:
                raise
            tries += 1  # the parent goes on, and has deleted what was chosen
    _tell(asked, choice, "begins", say)
    return choice.forked_from


def foresee(asked: Fork, wanted: Recipe, say: Say) -> None:
    """Say what :func:`fork` would begin with now; nothing is written.

    Raises:
        MilesbatchError: as :func:`fork` would, but for damage in the payload of older checkpoints, which is not read.
    """
    _refuse_places(asked)
    if (made := _made_before(asked)) is not None:
        say(f"{asked.target.root} was made already, from step {made.step} of run {made.run_id}")
        return
    _tell(asked, choose(asked.parent, wanted, asked.step), "would begin", say)


def _tell(asked: Fork, choice: Choice, begins: str, say: Say) -> None:
    told = choice.forked_from
    for step, reason in choice.passed_over:
        say(f"checkpoint {step} of {asked.said} cannot be used: {reason}")
    say(f"{asked.target.root} {begins} with step {told.step} of {asked.said} (run {told.run_id})")
    if not choice.is_exact:
        say(
            f"the parent has retired the policy versions before {told.first_version}: the first steps are made with that"
            " version, and are not those that the parent would have made"
        )


def _refuse_places(asked: Fork) -> Path:
    """Where the fork will lie: behind the symbolic links that were given.

    Raises:
        InputError: a fork cannot lie there, or not under that name.
    """
    old, new = true_path(asked.parent.root), true_path(asked.target.root)
    if new == old or new.is_relative_to(old) or old.is_relative_to(new):
        where = (
            "the run that is forked itself" if new == old else "inside it" if new.is_relative_to(old) else "above it"
        )
        raise InputError(
            f"--fork {asked.target.root} is {where} ({asked.parent.root})",
            mend="give a new directory beside it with --fork",
        )
    refuse_name(new, "--fork", longer_by=len(os.fsencode(_building(new).name)) - len(os.fsencode(new.name)))
    return new


def _made_before(asked: Fork) -> ForkedFrom | None:
    """The fork that was made in the target already; None when nothing is there.

    Raises:
        RunMismatchError: it is another run. InputError: it is no run. CorruptArtefactError: it was made, and is damaged.
    """
    target = asked.target
    for directory in (target.root, asked.parent.root):
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file", mend="give run directories with --run-dir and --fork")
    record = read_run_record(target)
    begun = read_beginning(target) if record is None else None
    found = record.forked_from if record is not None else begun.forked_from if begun is not None else None
    if found is None:
        if record is None and not _is_free(target.root):
            raise InputError(
                f"--fork {target.root}: it exists, is not empty, and is no fork",
                mend="give a new directory with --fork",
            )
        if record is not None:
            raise RunMismatchError(
                f"--fork {target.root}: it is run {record.run_id}, which is no fork",
                mend="give a new directory with --fork, or continue that run with --run-dir",
            )
        return None
    parent = read_run_record(asked.parent)
    if parent is not None and parent.run_id != found.run_id:
        raise RunMismatchError(
            f"--fork {target.root}: it was forked from run {found.run_id}, {asked.parent.root} is run {parent.run_id}",
            mend="give a new directory with --fork",
        )
    if asked.step not in (None, found.step):
        raise RunMismatchError(
            f"--fork {target.root}: it was forked behind step {found.step}, not {asked.step}",
            mend="give a new directory with --fork, or leave --fork-step out to go on with that run",
        )
    return found


def _is_free(directory: Path) -> bool:
    try:
        return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    except OSError as error:
        raise storage_error(directory, error) from error


def _make(choice: Choice, root: Path) -> None:
    """Take the files over and give them their name."""
    building = RunLayout(_building(root))
    try:
        make_directory(building.root)
        _fill(choice, building)
        _name(building.root, root)
    finally:
        if building.root.exists():
            remove_tree(building.root)


def _fill(choice: Choice, building: RunLayout) -> None:
    parent, told = choice.parent, choice.forked_from
    files: list[FileRef] = []

    def take(source: Path, ref: FileRef, target: Path) -> None:
        make_directory(target.parent)
        take_file(source, ref, target)
        files.append(ref.model_copy(update={"path": str(target.relative_to(building.root))}))

    def write(target: Path, data: bytes) -> None:
        make_directory(target.parent)
        create_exclusively(target, data)
        files.append(file_ref(target, name=str(target.relative_to(building.root))))

    for ref in choice.record.files:
        if ref.path.startswith(f"{parent.model.name}/"):
            take(parent.root / ref.path, ref, building.root / ref.path)
        elif ref.path == parent.recipe.name:
            take(parent.recipe, ref, building.parent_recipe)
    write(building.parent_run_record, _same(parent.run_record))
    for manifest in choice.weights:
        for ref in manifest.files:
            source = parent.weights_version(manifest.version) / ref.path
            take(source, ref, building.weights_version(manifest.version) / ref.path)
        own = manifest.model_copy(update={"incarnation": FORKED})
        write(building.weights_manifest(manifest.version), own.to_bytes())
    if choice.checkpoint is not None:
        _take_checkpoint(choice, building, take, write)
    if told.weights_digest is not None:
        write(building.parent_weights, _same(parent.weights_manifest(told.step)))
    for directory in sorted({(building.root / ref.path).parent for ref in files}):
        sync_names(directory)
    record = ForkRecord(forked_from=told, files=tuple(files), created_at=utc_now())
    publish_file(building.fork, record.to_bytes())


def _take_checkpoint(
    choice: Choice,
    building: RunLayout,
    take: Callable[[Path, FileRef, Path], None],
    write: Callable[[Path, bytes], None],
) -> None:
    """Its shards, under the name that goes with :data:`FORKED`, and a manifest of the fork's own; the parent's is kept, too."""
    manifest, step = choice.checkpoint, choice.forked_from.step
    assert manifest is not None
    shards = building.checkpoint_shards(step, FORKED)
    refs = []
    for ref in manifest.files:
        source = choice.parent.checkpoint(step) / ref.path
        target = shards / Path(ref.path).relative_to(Path(ref.path).parts[0])
        take(source, ref, target)
        refs.append(ref.model_copy(update={"path": str(target.relative_to(building.checkpoint(step)))}))
    # Groups that were finished and had no fate are generated again: their files are the parent's.
    changed = {"incarnation": FORKED, "files": tuple(refs), "fates_since": step, "fates": {}, "pending": ()}
    write(building.checkpoint_manifest(step), manifest.model_copy(update=changed).to_bytes())
    data = _same(choice.parent.checkpoint_manifest(step))
    if digest_bytes(data) != choice.forked_from.checkpoint_digest:
        raise CorruptArtefactError(f"{choice.parent.checkpoint_manifest(step)} has changed since it was read")
    write(building.parent_checkpoint, data)


def _same(path: Path) -> bytes:
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing", mend="run `milesbatch audit` on its run", unseen=path)
    return data


def _name(building: Path, target: Path) -> None:
    """The commit. An empty directory of that name is replaced, anything else is not."""
    try:
        try:
            current().rename(building, target)
        except OSError as error:
            if building.exists():  # else only the reply was lost
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise RunHeldError(
                        f"{target} was made by another process at the same time",
                        mend="give the same command again: it goes on with what is there",
                    ) from error
                raise
        current().sync_directory(target.parent)
    except OSError as error:
        raise storage_error(target, error) from error


def _building(root: Path) -> Path:
    """Another name beside ``root`` at each call."""
    return root.with_name(f".{root.name}.fork-{_maker()}-{secrets.token_hex(4)}")


def _maker() -> str:
    """Who makes a directory, in its name: known from its first moment on."""
    return f"{socket.gethostname()}-{os.getpid()}-{_start_tag(process_started())}"


def _start_tag(started: str | None) -> str:
    return digest_bytes((started or "").encode()).removeprefix("xxh128:")[:8]


def _remove_left(target: Path, say: Say) -> None:
    """Remove what makers of this fork have left who were killed on this host; of others it is said where it lies."""
    for path in sorted(target.parent.glob(".*.fork-*")):
        match = _MAKER.fullmatch(path.name)
        if match is None or match["name"] != target.name or not path.is_dir():
            continue
        if match["host"] != socket.gethostname():
            say(f"{path} was begun on {match['host']}, and is left alone; remove it when nothing makes this fork there")
        elif match["start"] != _start_tag(process_started(match["pid"])):
            remove_tree(path)
