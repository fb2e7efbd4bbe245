"""The harness finds what it is for: with each of these bugs put into the protocol, it reports failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from crash_log import Mutation
from crash_search import Ending, Recording, record, search, search_twice, undisturbed

from milesbatch.decisions.retention import Needs
from milesbatch.store import durable
from milesbatch.store.durable import remove_files
from milesbatch.store.operations import current
from milesbatch.trainer.retiring import Retiring


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return undisturbed(tmp_path_factory.mktemp("whole"))


def behind(mutations: Sequence[Mutation], target: str, kind: str = "link") -> int:
    """Number of the first mutation of ``kind`` that gives the name ``target``."""
    return next(n for n, m in enumerate(mutations, 1) if m.kind == kind and (m.target or m.path).endswith(target))


def first_failure(recording: Recording, *numbers: int) -> str:
    report = search(recording, numbers, stop_at=1)
    assert report.failures, f"the harness has not seen the bug: {report}"
    return report.failures[0]


def test_without_the_bugs_the_same_points_are_sound(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path)
    names = ("recipe.yaml", "model/config.json", "batches/000001.json", "weights/000001/manifest.json")
    points = [behind(mutations, name) for name in names]
    assert search(Recording(expected, mutations), points).failures == []


def test_a_file_that_is_not_synced(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path, deaf=frozenset({"sync_file"}))
    report = search(Recording(expected, mutations), [behind(mutations, "batches/000001.json")])
    assert any("data missing" in failure and "CorruptArtefactError" in failure for failure in report.failures)


def test_a_directory_that_is_not_synced(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path, deaf=frozenset({"sync_directory"}))
    found = first_failure(Recording(expected, mutations), behind(mutations, "weights/000001/manifest.json"))
    assert "has no batch record" in found


@contextlib.contextmanager
def hasty_publishing(
    directory: Path,
    name: str | Callable[[str], str],
    before_commit: Callable[[], None] | None = None,
    needed_bytes: int | None = None,
) -> Iterator[durable.PublishedFile]:
    """A wrong ``durable.publishing``: visible first, durable later."""
    temporary = directory / f"{durable.TEMPORARY_PREFIX}{len(list(directory.iterdir()))}"
    with current().create(temporary) as stream:
        published = durable.PublishedFile(stream)
        yield published
        stream.flush()
        written = durable.file_ref(temporary)
        final = name if isinstance(name, str) else name(written.digest)
        published.ref = written.model_copy(update={"path": final})
        current().link(temporary, directory / final)
        current().unlink(temporary)
        current().sync_directory(directory)
        current().sync_file(directory / final, stream)


def test_what_is_visible_before_it_is_durable(expected: Ending, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for module in ("store.durable", "trajectories.writer", "weights.publisher"):
            stack.enter_context(mock.patch(f"milesbatch.{module}.publishing", hasty_publishing))
        mutations = record(tmp_path)
    found = first_failure(Recording(expected, mutations), behind(mutations, "batches/000001.json"))
    assert "quarantined" in found


def test_a_take_over_that_builds_on_what_is_not_durable(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path)
    points = [behind(mutations, "batches/000004.json")]
    assert search_twice(Recording(expected, mutations), points).failures == []
    with (
        mock.patch("milesbatch.store.takeover.settle", lambda *found: None),
        mock.patch("milesbatch.trainer.loop.settle", lambda *found: None),
    ):
        report = search_twice(Recording(expected, mutations), points)
    assert report.failures, "the harness has not seen the bug"
    assert "after it had been sealed" in report.failures[0], (
        "its groups had no fate any more, and no seal names their files"
    )


def test_a_run_record_that_names_temporary_files(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path)
    points = [behind(mutations, "model/config.json")]
    with mock.patch("milesbatch.store.create._model_files", lambda layout: sorted(layout.model.iterdir())):
        report = search(Recording(expected, mutations), points)
    assert any(".tmp-" in failure and "is missing" in failure for failure in report.failures)


def test_temporary_files_that_nobody_sweeps(expected: Ending, tmp_path: Path) -> None:
    mutations = record(tmp_path)
    points = [behind(mutations, "recipe.yaml")]
    with mock.patch("milesbatch.store.takeover.sweep_temporary", lambda directory: 0):
        report = search(Recording(expected, mutations), points)
    assert any("left behind" in failure for failure in report.failures)


def test_payload_that_goes_before_its_retirement_is_durable(expected: Ending, tmp_path: Path) -> None:
    """Seen only where nothing retires again: the run was finished."""

    def hasty(retiring: Retiring, version: int, base: int, needs: Needs) -> None:
        remove_files(retiring._layout.weights_version(version), retiring._payload(version))
        retire(retiring, version, base, needs)

    retire = Retiring._retire
    with mock.patch.object(Retiring, "_retire", hasty):
        mutations = record(tmp_path)
    (point,) = (n for n, m in enumerate(mutations, 1) if m.kind == "unlink" and "weights/000003/delta" in m.path)
    assert "is missing" in first_failure(Recording(expected, mutations), point)


def test_payload_that_something_needs(expected: Ending, tmp_path: Path) -> None:
    with mock.patch("milesbatch.trainer.retiring.versions_to_retire", lambda base, retired: tuple(range(base + 1))):
        mutations = record(tmp_path)
    found = first_failure(Recording(expected, mutations), behind(mutations, "checkpoints/000007/manifest.json"))
    assert "weights/000002/retired.json" in found


def test_an_update_that_does_not_wait_for_the_copy_of_the_state(expected: Ending, tmp_path: Path) -> None:
    """A continued run loads a state that is not of the checkpoint's step."""
    with mock.patch("milesbatch.trainer.checkpointing.Checkpointer.await_copy", lambda checkpointer: None):
        mutations = record(tmp_path)
    found = first_failure(Recording(expected, mutations), behind(mutations, "batches/000007.json"))
    assert "DivergenceError" in found
