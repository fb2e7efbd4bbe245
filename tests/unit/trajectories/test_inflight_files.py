"""Files of unfinished episodes: what is saved is read again, and nothing else is."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders import flip, make_layout, unfenced

from milesbatch.errors import CorruptArtefactError, FencedError, FormatVersionError
from milesbatch.ids import VersionSpan
from milesbatch.records import digest_bytes
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories import inflight_schema
from milesbatch.trajectories.experts import RoutedExperts
from milesbatch.trajectories.inflight_reader import read_inflight, unfinished_episodes
from milesbatch.trajectories.inflight_schema import (
    KEY_KIND,
    BegunSample,
    InflightMetadata,
    Life,
    to_table,
    tokens_digest,
)
from milesbatch.trajectories.inflight_writer import write_inflight
from milesbatch.trajectories.reader import read_table
from milesbatch.trajectories.schema import KEY_FORMAT, KEY_TOKENIZER

METADATA = InflightMetadata("run-1", digest_bytes(b"tokenizer"))
WEIGHTS = (digest_bytes(b"weights 4"), digest_bytes(b"weights 6"))


def make(group: int = 8, sample: int = 0, **changes: Any) -> BegunSample:
    """4 tokens over versions 4 and 6, drawn in incarnations 1 and 3."""
    values: dict[str, Any] = {
        "group_id": group,
        "sample_index": sample,
        "prompt_digest": tokens_digest((5, 6)),
        "tokens": (7, 8, 9, sample),
        "logprobs": (-0.5, -0.25, 0.0, -3.0),
        "versions": (VersionSpan(0, 4), VersionSpan(2, 6)),
        "weights": WEIGHTS,
        "finish_reason": None,
        "started": datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC),
        "lives": (Life(1, 3), Life(3, 4)),
    }
    return BegunSample(**{**values, **changes})


def write(layout: RunLayout, *samples: BegunSample, **changes: Any) -> Path:
    values: dict[str, Any] = {"groups": range(8, 12), "incarnation": 3, "worker": "rollout-1", "metadata": METADATA}
    name, ref = write_inflight(layout, samples, **{**values, "before_commit": unfenced, **changes})
    path = layout.unfinished(name)
    assert path.stat().st_size == ref.bytes
    return path


def put(layout: RunLayout, table: pa.Table) -> Path:
    """A file as somebody else would write it: its name proves its content."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return put_bytes(layout, sink.getvalue().to_pybytes())


def put_bytes(layout: RunLayout, data: bytes) -> Path:
    path = layout.unfinished(TrajectoryName(8, 11, 3, "rollout-1", digest_bytes(data)[7:23]))
    path.write_bytes(data)
    return path


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


def test_what_is_saved_is_read_again(layout: RunLayout) -> None:
    samples = (make(9, 1, finish_reason="stop"), make(8, 1), make(8, 0, finish_reason="length"))
    path = write(layout, *samples)
    assert path.name.startswith("000008-000011.i000003.rollout-1.")
    found = read_inflight(path)
    assert found.samples == (samples[2], samples[1], samples[0])
    assert (found.metadata, found.num_bytes, str(found.name)) == (METADATA, path.stat().st_size, path.name)
    assert [p.name for p in layout.inflight.iterdir()] == [path.name]


def test_times_keep_their_moment(layout: RunLayout) -> None:
    here = datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    (sample,) = read_inflight(write(layout, make(started=here))).samples
    assert sample.started == here and sample.started.tzinfo is UTC


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ()},
        {"tokens": (7, 8, 9)},
        {"tokens": (7, 8, 9, -1)},
        {"logprobs": (0.0, 0.0, 0.0, 0.5)},
        {"logprobs": (0.0, 0.0, 0.0, float("nan"))},
        {"versions": (), "weights": ()},
        {"versions": (VersionSpan(1, 4), VersionSpan(2, 6))},
        {"versions": (VersionSpan(0, 6), VersionSpan(2, 6))},
        {"versions": (VersionSpan(0, 4), VersionSpan(4, 6))},
        {"weights": WEIGHTS[:1]},
        {"weights": (WEIGHTS[0], "md5:1")},
        {"prompt_digest": "5, 6"},
        {"finish_reason": "abort"},
        {"started": datetime(2026, 3, 1)},
        {"lives": ()},
        {"lives": (Life(3, 3), Life(1, 4))},
        {"lives": (Life(1, 4), Life(3, 4))},
        {"lives": (Life(1, 3),)},
        {"group_id": -1},
        {"routed_experts": RoutedExperts(2, b"ab" * 4)},
    ],
    ids=str,
)
def test_what_does_not_agree_is_neither_written_nor_read(
    layout: RunLayout, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make(**changes)
    with pytest.raises(ValueError, match=r"begun sample 0|not samples of"):
        write(layout, bad)
    assert list(layout.inflight.iterdir()) == []
    if changes.get("started") is None and len(bad.versions) == len(bad.weights):  # the others cannot even be spelled
        with pytest.raises(CorruptArtefactError, match="holds what no writer commits"):
            read_inflight(put(layout, to_table([bad], METADATA)))


def test_only_samples_of_the_block_each_once(layout: RunLayout) -> None:
    for samples in ((make(12),), (make(8), make(8)), ()):
        with pytest.raises(ValueError, match="not samples of groups"):
            write(layout, *samples)
    for samples in ((make(12),), (make(8), make(8))):
        with pytest.raises(CorruptArtefactError, match="twice, or of a group"):
            read_inflight(put(layout, to_table(samples, METADATA)))


def test_a_fenced_writer_leaves_nothing(layout: RunLayout) -> None:
    def fenced() -> None:
        raise FencedError("taken over")

    with pytest.raises(FencedError):
        write(layout, make(), before_commit=fenced)
    assert list(layout.inflight.iterdir()) == []


def test_any_damage_is_found(layout: RunLayout) -> None:
    path = write(layout, make(), make(9))
    data = path.read_bytes()
    for offset in (0, len(data) // 3, len(data) // 2, -20, -1):
        flip(path, offset)
        with pytest.raises(CorruptArtefactError, match="is damaged: expected a digest that begins"):
            read_inflight(path)
        path.write_bytes(data)
    for cut in (b"", data[:100], data[:-1]):
        path.write_bytes(cut)
        with pytest.raises(CorruptArtefactError) as caught:
            read_inflight(path)
        assert caught.value.unseen == path, "it may be that only a beginning of it is visible yet"
    path.unlink()
    with pytest.raises(CorruptArtefactError, match="is missing") as caught:
        read_inflight(path)
    assert caught.value.unseen == path


def test_whole_files_of_something_else(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    table = to_table([make()], METADATA)
    metadata = table.schema.metadata
    for kept in ({}, {**metadata, KEY_KIND: b"trajectories"}, {**metadata, KEY_FORMAT: b"one"}):
        with pytest.raises(CorruptArtefactError, match="not a file of unfinished episodes"):
            read_inflight(put(layout, table.replace_schema_metadata(kept)))
    without = {key: value for key, value in metadata.items() if key != KEY_TOKENIZER}
    with pytest.raises(CorruptArtefactError, match="no writer commits"):
        read_inflight(put(layout, table.replace_schema_metadata(without)))
    with pytest.raises(FormatVersionError, match="newer"):
        read_inflight(put(layout, table.replace_schema_metadata({**metadata, KEY_FORMAT: b"2.0"})))
    for other in (table.drop_columns(["lives"]), table.append_column("more", pa.array([1]))):
        with pytest.raises(CorruptArtefactError, match="other columns"):
            read_inflight(put(layout, other.replace_schema_metadata(metadata)))
    for data in (b"", b"ARROW1\0\0ARROW1", b"no Arrow at all " * 9):
        with pytest.raises(CorruptArtefactError, match="cannot be parsed"):
            read_inflight(put_bytes(layout, data))


def test_times_that_do_not_exist_are_damage(layout: RunLayout) -> None:
    table = to_table([make()], METADATA)
    late = pa.array([2**62], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    index = table.schema.get_field_index("started")
    with pytest.raises(CorruptArtefactError, match="no writer commits"):
        read_inflight(put(layout, table.set_column(index, table.schema.field(index), late)))


def test_a_trajectory_reader_refuses_it(layout: RunLayout) -> None:
    """Their names have the same form: what is copied into the other folder must not be taken for samples."""
    with pytest.raises(CorruptArtefactError, match=r"lacks|another schema"):
        read_table(write(layout, make()))


def test_how_many_are_unfinished(layout: RunLayout) -> None:
    assert unfinished_episodes(layout) == 0
    write(layout, make(8), make(9), make(9, 1, finish_reason="stop"))
    assert unfinished_episodes(layout) == 2
    write(layout, make(8), incarnation=2)  # an older file of the same block
    assert unfinished_episodes(layout) == 2
    write(layout, make(12), groups=range(12, 16))
    assert unfinished_episodes(layout) == 3
    put_bytes(layout, b"something else").rename(
        layout.inflight / "000016-000017.i000001.rollout-0.0123456789abcdef.arrow"
    )
    (layout.inflight / ".tmp-1").write_bytes(b"")
    assert unfinished_episodes(layout) == 3
    assert unfinished_episodes(RunLayout(layout.root / "nowhere")) == 0


def test_every_column_is_required_but_two() -> None:
    schema = inflight_schema.inflight_schema(4)
    assert [field.name for field in schema if field.nullable] == ["finish_reason", "routed_experts"]
    assert {field.name for field in dataclasses.fields(BegunSample)} - {"weights"} == set(schema.names)
    assert inflight_schema.inflight_schema().names == schema.names[:-1], "a dense model's files have no experts"


def test_experts_are_read_again_beside_samples_without(layout: RunLayout) -> None:
    experts = RoutedExperts(3, bytes(range(18)))
    samples = (make(8, 0, routed_experts=experts), make(8, 1))
    assert read_inflight(write(layout, *samples)).samples == samples
    with pytest.raises(ValueError, match=r"have \[2, 3\] bytes in one file"):
        write(layout, samples[0], make(8, 1, routed_experts=RoutedExperts(2, b"ab" * 6)))


@pytest.mark.parametrize("of", [pa.string(), pa.list_(pa.binary()), pa.list_(pa.binary(3)), pa.binary(3)], ids=str)
def test_experts_in_another_form_are_other_columns(layout: RunLayout, of: Any) -> None:
    table = to_table([make()], METADATA)
    table = table.append_column("routed_experts", pa.nulls(1, of)).replace_schema_metadata(table.schema.metadata)
    with pytest.raises(CorruptArtefactError, match="has other columns"):
        read_inflight(put(layout, table))
