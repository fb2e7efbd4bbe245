"""Taking away what does not count, and never what a newer incarnation wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import commit_batch, make_incarnation, make_layout, make_ref, publish, quarantined

from milesbatch.errors import FencedError, StorageError
from milesbatch.store.durable import create_exclusively
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.store.removal import take_away


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_layout(tmp_path / "run")
    for number in (1, 2):
        create_exclusively(layout.incarnation(number), make_incarnation(number).to_bytes())
    return layout


def test_what_an_older_one_wrote_is_moved(layout: RunLayout) -> None:
    commit_batch(layout, 1, [make_ref(0)], incarnation=1)
    publish(layout, [0], incarnation=1)
    for path in (layout.batch(1), layout.weights_version(0)):
        moved = take_away(layout, 2, path, "it does not count")
        assert moved.exists() and not path.exists()
    assert set(quarantined(layout).values()) == {"it does not count\n"}


def test_damage_is_moved_whoever_wrote_it(layout: RunLayout) -> None:
    for data in (b"", b"{", b"[1]", b'{"incarnation": "3"}', b"\x00\xff"):
        layout.batch(1).write_bytes(data)
        take_away(layout, 2, layout.batch(1), "damaged")
        assert not layout.batch(1).exists()


def test_one_that_was_replaced_takes_nothing(layout: RunLayout) -> None:
    commit_batch(layout, 1, [make_ref(0)], incarnation=1)
    with pytest.raises(FencedError):
        take_away(layout, 1, layout.batch(1), "it does not count")
    assert layout.batch(1).exists() and quarantined(layout) == {}


class TakenOver(Operations):
    """Between the look at the fence and the move another incarnation comes and puts its own in place."""

    def __init__(self, replace: object) -> None:
        self._replace = replace

    def rename(self, source: Path, target: Path) -> None:
        if callable(self._replace):
            replace, self._replace = self._replace, None
            replace()
        super().rename(source, target)


def test_what_a_newer_one_has_put_there_is_put_back(layout: RunLayout) -> None:
    commit_batch(layout, 1, [make_ref(0)], incarnation=1)

    def replace() -> None:
        layout.batch(1).unlink()
        commit_batch(layout, 1, [make_ref(0)], incarnation=3)

    with installed(TakenOver(replace)), pytest.raises(FencedError, match=r"incarnation 3 has taken over .* is its own"):
        take_away(layout, 2, layout.batch(1), "it does not count")
    assert b'"incarnation": 3' in layout.batch(1).read_bytes()
    assert list(layout.quarantine.iterdir()) == []


def test_a_directory_is_put_back_too(layout: RunLayout) -> None:
    publish(layout, [0], incarnation=1)

    def replace() -> None:
        layout.weights_version(0).rename(layout.root / "elsewhere")
        publish(layout, [0], incarnation=3)

    with installed(TakenOver(replace)), pytest.raises(FencedError):
        take_away(layout, 2, layout.weights_version(0), "it does not count")
    assert layout.weights_manifest(0).exists() and len(list(layout.weights_version(0).iterdir())) == 2
    assert list(layout.quarantine.iterdir()) == []


def test_what_cannot_be_put_back_stays_in_quarantine(layout: RunLayout) -> None:
    commit_batch(layout, 1, [make_ref(0)], incarnation=3)

    class Refilled(Operations):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            source.write_bytes(b"by somebody else")

    with installed(Refilled()), pytest.raises(StorageError, match=r"000001\.json"):
        take_away(layout, 2, layout.batch(1), "it does not count")
    assert layout.batch(1).read_bytes() == b"by somebody else"
    assert len(quarantined(layout)) == 1
