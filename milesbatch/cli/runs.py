"""Which run does the user mean? A directory, or a name under ``$MILESBATCH_RUNS``."""

from __future__ import annotations

from pathlib import Path

from milesbatch.cluster.context import runs_directory
from milesbatch.errors import InputError
from milesbatch.jobs.order import was_submitted
from milesbatch.store.beginning import not_started, read_beginning
from milesbatch.store.layout import RunLayout


def find_run(text: str) -> RunLayout:
    """The run that ``text`` names.

    Raises:
        InputError: there is no run under that name; lists those that exist.
    """
    for candidate in _candidates(text):
        if candidate.is_dir() and RunLayout(candidate).run_record.exists():
            return RunLayout(candidate)
    _refuse_file(text)
    _refuse_fork(text)
    raise _none_at(text)


def _refuse_file(text: str) -> None:
    """Raises:
    InputError: it is there, and no directory.
    """
    if Path(text).exists() and not Path(text).is_dir():
        raise InputError(f"{text} is not a run: it is a file", mend="give the path of a run directory")


def find_submitted(text: str) -> RunLayout:
    """The run that ``text`` names, or the directory of one that was submitted and has not begun.

    Raises:
        InputError: there is neither; lists what exists. CorruptArtefactError: it is a fork that its job cannot begin with.
    """
    for candidate in _candidates(text):
        if RunLayout(candidate).run_record.exists() or was_submitted(RunLayout(candidate)):
            read_beginning(RunLayout(candidate))
            return RunLayout(candidate)
    _refuse_fork(text)
    raise _none_at(text)


def _refuse_fork(text: str) -> None:
    """Of a fork that was made and not started it is said that it is one.

    Raises:
        InputError: it is one. CorruptArtefactError: it is one, and damaged.
    """
    for candidate in _candidates(text):
        layout = RunLayout(candidate)
        if (told := not_started(layout, was_submitted(layout))) is not None:
            raise told


def _candidates(text: str) -> list[Path]:
    candidates = [Path(text)]
    if Path(text).name == text:
        candidates.append(runs_directory() / text)
    return candidates


def _none_at(text: str) -> InputError:
    runs = sorted(path.parent.name for path in runs_directory().glob("*/run.json"))
    queued = sorted({path.parents[1].name for path in runs_directory().glob("*/jobs/recipe-*.yaml")} - set(runs))
    waiting = f"; submitted: {', '.join(queued)}" if queued else ""
    return InputError(
        f"there is no run at {' or '.join(map(str, _candidates(text)))}",
        mend=f"runs under {runs_directory()}: {', '.join(runs) or 'none'}{waiting}; or give the path of a run directory",
    )
