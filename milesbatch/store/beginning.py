"""What a fork was given before a run is made of it: ``fork.json``, proven against what lies beside it. Reads only.

Owns the errors of a beginning that is damaged: nothing was trained from it yet, so the mend is always to fork again. Invariant:
a run is made only of a beginning whose model, tokenizer and records of the parent have the digests that ``fork.json`` states.
Payload of weights and checkpoints is proven by the take-over (``store/survey.py``), which reads it anyway; here it is asked for
by name and size. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

import shlex

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import FileRef, ForkRecord
from milesbatch.store.durable import storage_error, verify_file
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_fork


def read_beginning(layout: RunLayout) -> ForkRecord | None:
    """What was taken over from a parent, checked; None when the directory is no fork, or is a run already.

    Raises:
        CorruptArtefactError: a file of it is missing or damaged; names it.
    """
    if layout.run_record.exists():
        return None
    try:
        fork = read_fork(layout)
        for ref in () if fork is None else fork.files:
            _check(layout, ref)
    except CorruptArtefactError as error:
        raise CorruptArtefactError(error.what, mend=_again(layout), unseen=error.unseen) from error
    if fork is None and layout.parent_run_record.exists():
        raise CorruptArtefactError(f"{layout.fork} is missing", mend=_again(layout), unseen=layout.fork)
    return fork


def not_started(layout: RunLayout, was_submitted: bool) -> InputError | None:
    """What to say of a directory in which a fork was made and no run yet; None when it is something else.

    Raises:
        CorruptArtefactError: it is damaged; says to fork again.
    """
    fork = read_beginning(layout)
    if fork is None:
        return None
    told = fork.forked_from
    run = shlex.quote(str(layout.root))
    return InputError(
        f"{layout.root} is a fork that was made from step {told.step} of {told.path} (run {told.run_id}) and was not started"
        " yet: it has no run.json",
        mend=f"its job makes the run: watch `milesbatch status {run}`, and if nothing is queued, `milesbatch resume {run}`"
        if was_submitted
        else f"start it with `milesbatch run RECIPE --run-dir {run}` (or `milesbatch submit`), with the recipe and the --set"
        " that it was forked with",
    )


def _check(layout: RunLayout, ref: FileRef) -> None:
    path = layout.root / ref.path
    is_payload = ref.path.startswith((f"{layout.weights.name}/", f"{layout.checkpoints.name}/"))
    if not is_payload or path.name == layout.weights_manifest(0).name:
        verify_file(path, ref)
        return
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptArtefactError(
            f"{path} is missing; expected {ref.bytes} bytes, {ref.digest}", unseen=path
        ) from None
    except OSError as error:
        raise storage_error(path, error) from error
    if size != ref.bytes:
        raise CorruptArtefactError(
            f"{path} is damaged: it has {size} bytes, expected {ref.bytes}", unseen=path if size < ref.bytes else None
        )


def _again(layout: RunLayout) -> str:
    run = shlex.quote(str(layout.root))
    return f"nothing was trained from it: remove {run} and fork again, with the same --run-dir and --fork"
