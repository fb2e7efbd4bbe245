"""Every error a user can meet, grouped by what mends it. No I/O.

An error says what was attempted, on which thing, what was found, and what to do next. The command line prints
``str(error)`` and exits with ``error.exit_code``; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

from pathlib import Path

EXIT_NOT_WELL = 1
EXIT_USAGE = 2
EXIT_TEMPFAIL = 75
"""EX_TEMPFAIL of sysexits.h: stopped in order to be continued."""
EXIT_NO_RESTART = 93
"""Only between a role process and its controller: failed, and starting it again cannot help."""


class MilesbatchError(Exception):
    """Base of all expected errors. ``mend`` is the sentence that tells the user what to do next."""

    exit_code = EXIT_NOT_WELL
    may_restart = True
    """Whether starting the process again can help."""

    def __init__(self, what: str, *, mend: str = "", unseen: Path | None = None) -> None:
        self.what = what
        self.mend = mend
        self.unseen = unseen
        """What is missing or cut short, so that looking again may help: a shared filesystem shows it late."""
        super().__init__(what if not mend else f"{what}\n  what to do: {mend}")


# -- mended by the person who wrote the input ---------------------------------------------------------------------


class InputError(MilesbatchError):
    """The user's own input is wrong; starting again without a change cannot help. Never requeued."""

    exit_code = EXIT_USAGE


class UsageError(InputError):
    """The command needs something that was not given."""


class RecipeError(InputError):
    """A recipe field has a value that is not allowed, or is unknown."""


class SiteError(InputError):
    """A site file cannot be used, or the site cannot run what the recipe asks for."""


class ModelError(InputError):
    """The model directory, file or tokenizer named in the recipe cannot be used."""


class DataError(InputError):
    """The prompt data named in the recipe cannot be used; names file and line."""


class ExtensionError(InputError):
    """A user's function (``package.module:name``) cannot be imported, or broke its contract."""


class RunMismatchError(InputError):
    """The run directory belongs to another recipe, model or data set; nothing in it was touched."""


# -- mended by waiting or by starting again -----------------------------------------------------------------------


class RunHeldError(MilesbatchError):
    """Another controller holds this run and is alive."""

    exit_code = EXIT_TEMPFAIL


class FencedError(MilesbatchError):
    """A newer incarnation has taken over: this process must stop and must not write."""

    exit_code = EXIT_TEMPFAIL


class StoppedToContinue(MilesbatchError):
    """Stopped by a signal or a limit, in a state from which the same command continues."""

    exit_code = EXIT_TEMPFAIL


class BroadcastError(MilesbatchError):
    """Weights could not be sent or received in time; the version's files are there all the same, and are used instead."""


class EngineError(MilesbatchError):
    """A rollout engine's server could not be started, does not answer, or answered what it must not; says which, and what."""


class SlurmError(MilesbatchError):
    """A Slurm command failed, or Slurm does not answer; says the command and what it printed."""

    def __init__(self, what: str, *, mend: str = "", may_be_asked_again: bool = False, said: str = "") -> None:
        super().__init__(what, mend=mend)
        self.said = said
        """What the command printed, when it ran and failed."""
        self.may_be_asked_again = may_be_asked_again
        """Slurm did not answer: nothing is known, and the same question may be answered later."""


class JobRefusedError(SlurmError):
    """sbatch does not take a job as it is; says why."""

    exit_code = EXIT_USAGE


# -- mended on the filesystem -------------------------------------------------------------------------------------


class StorageError(MilesbatchError):
    """A path could not be read or written; names the path and the cause."""


class StorageFullError(StorageError):
    """No space or quota left; says how much was needed. Raised after the writer has waited for space."""

    may_restart = False


class LocalSpaceError(StorageError):
    """No space on one host, in a place that only one process uses: started again, there or elsewhere, it may find some."""


class StorageReadOnlyError(StorageError):
    """The filesystem or the directory does not accept writes."""

    may_restart = False


class NameTooLongError(InputError, StorageError):
    """A file or directory cannot have this name here: it is longer than the filesystem allows."""


# -- mended by quarantine, replay, or an older copy ---------------------------------------------------------------


class CorruptArtefactError(MilesbatchError):
    """A committed artefact does not match its digest, is truncated, or cannot be parsed; names path and digests."""


class FormatVersionError(MilesbatchError):
    """The run was written by a newer major format version than this reader knows."""


class DivergenceError(MilesbatchError):
    """A replayed step gave other weights than the published ones and the recipe says ``on_divergence: stop``."""

    may_restart = False


# -- mended by looking at the logs --------------------------------------------------------------------------------


class RunFailedError(MilesbatchError):
    """The run stopped for a bad reason: no progress over several restarts, or too many failed episodes."""
