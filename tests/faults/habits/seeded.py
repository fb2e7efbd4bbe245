"""Many seeds through one scenario, each on a fresh shared filesystem; the one that fails is named."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from shared_filesystem import PROFILES, SharedFilesystem

from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import Sight
from milesbatch.store.takeover import Claimant, Incarnation, take_over

QUIET = {"lost_replies": 0.0, "refused": 0.0, "full_targets": 0}
"""Only what hosts see differs; every mutation succeeds and says so."""
WAIT_S = 90.0


class Cases:
    """Seeds times profiles, and what the habits did in all of them."""

    def __init__(self, profiles: tuple[str, ...] = tuple(PROFILES)) -> None:
        self._profiles = profiles
        self.mishaps: dict[str, int] = {}
        self.count = 0

    def run(self, seeds: range, scenario: Callable[[SharedFilesystem], None], **changes: Any) -> None:
        """``scenario`` for each seed and profile; ``changes`` to the profile's habits."""
        for profile in self._profiles:
            for seed in seeds:
                with self._case(profile, seed, changes) as shared:
                    scenario(shared)

    @contextlib.contextmanager
    def _case(self, profile: str, seed: int, changes: dict[str, Any]) -> Iterator[SharedFilesystem]:
        place = Path(tempfile.mkdtemp(prefix="habits-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        shared = SharedFilesystem(place / "fs", replace(PROFILES[profile], **changes), seed)
        try:
            with shared.mounted():
                yield shared
        except BaseException as error:
            error.add_note(f"profile {profile}, seed {seed}, changes {changes}")
            raise
        finally:
            shutil.rmtree(place)
            self.count += 1
            for habit, times in shared.mishaps.items():
                self.mishaps[habit] = self.mishaps.get(habit, 0) + times


def on(shared: SharedFilesystem, host: str) -> RunLayout:
    """The run as ``host`` sees it."""
    return RunLayout(shared.mount(host) / "run")


def patient() -> Sight:
    return Sight(WAIT_S, lambda text: None)


def start(layout: RunLayout, sight: Sight | None = None) -> Incarnation:
    """A controller takes over whose process has ended by the time that anybody asks."""
    with mock.patch("milesbatch.store.takeover.process_started", lambda: "a process that has ended"):
        return take_over(layout, Claimant(), {}, sight=sight or patient())
