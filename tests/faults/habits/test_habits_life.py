"""Whole runs on many hosts, killed twice, under every kind of filesystem: they end as a run that nothing happened to."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from crash_search import Ending, undisturbed
from habits_life import Story, problems_of, run_on_hosts
from seeded import QUIET
from shared_filesystem import PROFILES, SharedFilesystem

FEW, MANY = 6, 300
KILLS = 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return undisturbed(tmp_path_factory.mktemp("whole"))


def live_many(profile: str, seeds: range, expected: Ending, *, kills: int, quiet: bool = False) -> list[Story]:
    """One run for each seed; all problems of all seeds, each with its seed."""
    stories, problems = [], []
    for seed in seeds:
        place = Path(tempfile.mkdtemp(prefix="habits-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        habits = replace(PROFILES[profile], **QUIET) if quiet else PROFILES[profile]
        try:
            with SharedFilesystem(place / "fs", habits, seed).mounted() as shared:
                story = run_on_hosts(shared, kills=kills)
                found = problems_of(shared, expected, may_lose=profile == "hostile") + story.unexpected()
        except BaseException as error:
            error.add_note(f"profile {profile}, seed {seed}")
            raise
        finally:
            shutil.rmtree(place)
        stories.append(story)
        problems += [f"profile {profile}, seed {seed}: {problem}" for problem in found]
    assert problems == []
    return stories


@pytest.mark.parametrize("profile", PROFILES)
def test_runs_end_as_if_nothing_had_happened(profile: str, expected: Ending) -> None:
    stories = live_many(profile, range(FEW), expected, kills=KILLS)
    assert sum(story.kills for story in stories) >= FEW
    assert sum(story.lives for story in stories) > 2 * FEW


@pytest.mark.parametrize("profile", ["nfs", "lustre", "beegfs"])
def test_where_only_the_views_differ_no_process_ends(profile: str, expected: Ending) -> None:
    """Every wait is long enough: nobody is started again, and one start does it."""
    stories = live_many(profile, range(100, 100 + FEW // 2), expected, kills=0, quiet=True)
    assert [(story.lives, story.errors) for story in stories] == [(1, [])] * len(stories)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("profile", PROFILES)
def test_many_runs(profile: str, expected: Ending) -> None:
    live_many(profile, range(1000, 1000 + MANY), expected, kills=KILLS)
