"""An update that changed nothing, or far more or less than usual, is named with its tensors; others are not."""

from __future__ import annotations

from milesbatch.records import FileRef, TensorEntry, WeightsManifest
from milesbatch.trainer.density import DensityWatch


def _manifest(version: int, changed: dict[str, int], *, parent: bool = True) -> WeightsManifest:
    entries = tuple(
        TensorEntry(
            name=name,
            dtype="BF16",
            shape=(100, 100),
            digest="x",
            encoding="steps-zstd" if parent else "raw",
            changed=count,
            file="f" if parent else "k",
        )
        for name, count in changed.items()
    )
    return WeightsManifest(
        version=version, incarnation=1, artefact="delta" if parent else "keyframe", parent=version - 1 if parent else None,
        keyframe=None if parent else "k", weights_digest="x", tensors=entries, tied={}, created_at="",
        files=(FileRef(path="f" if parent else "k", bytes=1, digest="x"),),
    )  # fmt: skip


def _usual(watch: DensityWatch, versions: int = 8) -> None:
    for version in range(1, versions + 1):
        assert watch.look(_manifest(version, {"a": 100 + version, "b": 50, "c": 10}), moved=True) is None


def test_a_steady_run_gives_no_warning() -> None:
    watch = DensityWatch()
    _usual(watch, 40)
    assert watch.look(_manifest(41, {"a": 250, "b": 120, "c": 0}), moved=True) is None


def test_an_empty_delta_after_a_step_that_was_not_zero() -> None:
    text = DensityWatch().look(_manifest(1, {"a": 0, "b": 0}), moved=True)
    assert text is not None and "no element of 2 tensors changed (a, b)" in text
    assert DensityWatch().look(_manifest(1, {"a": 0, "b": 0}), moved=False) is None


def test_far_more_or_less_than_usual_names_what_did_it() -> None:
    watch = DensityWatch()
    _usual(watch)
    text = watch.look(_manifest(9, {"a": 105, "b": 50, "c": 4000}), moved=True)
    assert text is not None and "13.850% of the elements changed, usually 0.548%" in text and "before: c, " in text
    fewer = watch.look(_manifest(10, {"a": 1, "b": 5, "c": 2}), moved=True)
    assert fewer is not None and "most unlike before: a" in fewer


def test_keyframes_and_beginnings_say_nothing() -> None:
    watch = DensityWatch()
    assert watch.look(_manifest(0, {"a": 10_000}, parent=False), moved=True) is None
    for version in range(1, 5):
        assert watch.look(_manifest(version, {"a": 1 if version % 2 else 9000}), moved=True) is None


def test_many_names_are_cut() -> None:
    text = DensityWatch().look(_manifest(1, {f"layer{n}": 0 for n in range(9)}), moved=True)
    assert text is not None and "layer4 and 4 more" in text
