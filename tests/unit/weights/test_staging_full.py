"""A staged model on a filesystem that is full: what is current is whole at every moment, and there it goes on later."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from staged_copy import Make, assert_holds

from milesbatch.errors import StorageFullError, StorageReadOnlyError
from milesbatch.store.durable import storage_error
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.weights import materialize as materialize_module
from milesbatch.weights import staging as module
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.staging import Staging
from milesbatch.weights.tensors import RawTensor


@pytest.fixture(autouse=True)
def model(layout: RunLayout) -> None:
    (layout.model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


class Disk(Operations):
    """Counts what takes space below a directory; the n-th finds none, and with ``lasts`` none does that comes after it."""

    def __init__(self) -> None:
        self.count, self.first, self.lasts = 0, 0, False

    def full_from(self, number: int, *, lasts: bool) -> None:
        self.count, self.first, self.lasts = 0, number, lasts

    def empty(self) -> None:
        self.first = 0

    @property
    def was_full(self) -> bool:
        return 0 < self.first <= self.count

    def take(self, path: Path) -> None:
        self.count += 1
        if self.count == self.first or (self.lasts and self.was_full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def create(self, path: Path) -> BinaryIO:
        self.take(path)
        return super().create(path)

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        self.take(path)
        super().sync_file(path, stream)

    def link(self, source: Path, target: Path) -> None:
        self.take(target)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.take(target)
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self.take(target)
        super().replace(source, target)

    def make_directory(self, path: Path) -> None:
        self.take(path)
        super().make_directory(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    write_redo, write_tensors = module._write_redo, materialize_module.write_tensors

    def half_of_the_redo(path: Path, redo: module._Redo) -> None:
        try:
            disk.take(path)
        except OSError as error:
            write_redo(path, redo)
            os.truncate(path, path.stat().st_size // 2)
            raise storage_error(path, error) from error
        write_redo(path, redo)

    def half_of_the_tensors(stream: BinaryIO, tensors: dict[str, RawTensor]) -> None:
        some = dict(list(tensors.items())[: len(tensors) // 2])
        try:
            disk.take(Path("tensors"))
        except OSError:
            write_tensors(stream, some)
            raise
        write_tensors(stream, tensors)

    monkeypatch.setattr(module, "_write_redo", half_of_the_redo)
    monkeypatch.setattr(materialize_module, "write_tensors", half_of_the_tensors)
    with installed(disk):
        yield disk


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions of which full copies were begun."""
    rebuild, begun = module.rebuild, []

    def note(layout: RunLayout, version: int, **options: Any) -> Any:
        begun.append(version)
        return rebuild(layout, version, **options)

    monkeypatch.setattr(module, "rebuild", note)
    return begun


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize(("start", "way"), [(None, (1,)), (1, (2,)), (1, (2, 3)), (2, (4,)), (4, (3,))])
def test_without_space_at_any_write_what_is_current_is_whole_and_the_next_advance_goes_on(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, disk: Disk, lasts: bool,
    start: int | None, way: tuple[int, ...], copies: list[int],
) -> None:  # fmt: skip
    """From nothing, by a patch, by a patch after one that was not finished, by a keyframe ahead, and back."""
    for number in range(1, 80):
        directory = tmp_path / f"stage-{number}"
        if start is not None:
            with Staging(directory, layout) as staging:
                staging.advance_to(start)
        disk.full_from(number, lasts=lasts)
        staging = None
        with suppress(StorageFullError):
            staging = Staging(directory, layout)
        found_no_space_to_open = staging is None
        if staging is None:
            disk.empty()
            staging = Staging(directory, layout)
        copies.clear()
        for version in way:
            for _ in range(2 if lasts else 1):
                with suppress(StorageFullError):
                    staging.advance_to(version)
                if staging.current is not None:
                    assert staging.current in (start, *way)
                    assert_holds(staging, staging.current, version_tensors)
        was_full = disk.was_full or found_no_space_to_open
        disk.empty()
        staging.advance_to(way[-1])
        assert_holds(staging, way[-1], version_tensors)
        if way == (2,):
            assert copies == [], "no full copy for a patch"
        staging.close()
        with Staging(directory, layout) as again:
            assert_holds(again, way[-1], version_tensors)
        if not was_full:
            break
    assert not was_full and number > 8


def test_a_directory_that_was_torn_and_found_no_space_when_it_was_opened_is_mended_later(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, disk: Disk, copies: list[int]
) -> None:
    torn = 0
    for number in range(1, 20):
        directory = tmp_path / f"stage-{number}"
        with Staging(directory, layout) as staging:
            staging.advance_to(1)
            disk.full_from(number, lasts=True)
            with suppress(StorageFullError):
                staging.advance_to(2)
        torn += disk.was_full
        copies.clear()
        with Staging(directory, layout) as staging:
            if staging.current is not None:
                assert_holds(staging, staging.current, version_tensors)
            disk.empty()
            staging.advance_to(2)
            assert_holds(staging, 2, version_tensors)
            assert copies == []
    assert 4 < torn < 19


def test_the_model_makes_way_only_where_that_is_enough(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Staging(tmp_path / "stage", layout) as staging:
        assert not staging.make_way(1)
        staging.advance_to(1)
        size = (staging.model / "model.safetensors").stat().st_size
        real = os.statvfs(tmp_path)
        for free, gives in ((-size // 2, False), (4096, True)):
            stated = os.statvfs_result((*real[:4], free // real.f_frsize, *real[5:]))
            monkeypatch.setattr(os, "statvfs", lambda path, stated=stated: stated)
            assert staging.make_way(2) is gives
            if gives:
                assert staging.current is None and not staging.model.exists()
            else:
                assert_holds(staging, 1, version_tensors)
    with Staging(tmp_path / "stage", layout) as staging:
        assert staging.current is None
        staging.advance_to(2)
        assert_holds(staging, 2, version_tensors)


def test_a_filesystem_that_turned_read_only_is_told_and_not_what_the_cleaning_up_found(
    layout: RunLayout, chain: Publisher, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Staging(tmp_path / "stage", layout) as staging:
        staging.advance_to(4)

        failed = []

        def fail(stream: object, tensors: object) -> None:
            failed.append(1)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        def cannot_remove(path: Path) -> None:
            if failed:
                raise StorageReadOnlyError(f"cannot write {path.parent}: the cleaning up")

        with monkeypatch.context() as patch:
            patch.setattr(materialize_module, "write_tensors", fail)
            patch.setattr(module, "remove_tree", cannot_remove)
            with pytest.raises(StorageReadOnlyError, match=r"model\.safetensors: Read-only"):
                staging.advance_to(3)
