"""Trajectory files: what is written is read again, and damage of any kind is found before use."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from milesbatch.engines.protocol import VersionSpan
from milesbatch.errors import CorruptArtefactError, FencedError, FormatVersionError
from milesbatch.records import digest_bytes
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.reader import iterate_files, read_metadata, read_table, read_trajectories
from milesbatch.trajectories.schema import KEY_FORMAT, FileMetadata, to_table, trajectory_schema
from milesbatch.trajectories.trajectory import Message, Trajectory
from milesbatch.trajectories.writer import write_trajectories

METADATA = FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template"))
START = datetime(2025, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def make(group: int = 7, sample: int = 0, **changes: Any) -> Trajectory:
    """Prompt of 3 tokens; the policy writes 2, a tool writes 1, the policy (a version later) writes 2."""
    values: dict[str, Any] = {
        "group_id": group,
        "sample_index": sample,
        "prompt_id": f"p{group}",
        "messages": (
            Message("user", "1+1="),
            Message("assistant", "2é", tool_calls='[{"name":"f"}]', tool_call_id="c1"),
        ),
        "tokens": (5, 6, 7, 8, 9, 10, 11, 12),
        "loss_mask": (False, False, False, True, True, False, True, True),
        "logprobs": (0.0, 0.0, 0.0, -0.5, -1.25, 0.0, -0.125, -3.0),
        "versions": (VersionSpan(3, 4), VersionSpan(6, 5)),
        "weights_digest": digest_bytes(b"weights"),
        "reward": 0.5 + sample,
        "rewards": {"format": 0.25, "answer": 0.25},
        "finish_reason": "stop",
        "turns": 2,
        "seed": -(2**62) + sample,
        "worker": "rollout-1",
        "incarnation": 3,
        "started": START,
        "ended": START + timedelta(seconds=2),
        "prompt_tokens": 3,
        "response_tokens": 5,
        "env": {"task": "add", "n": [1, 2]},
    }
    return Trajectory(**{**values, **changes})


def write(root: Path, trajectories: list[Trajectory], **changes: Any) -> Path:
    layout = RunLayout(root)
    layout.trajectories.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "incarnation": 3,
        "worker": "rollout-1",
        "metadata": METADATA,
        "before_commit": lambda: None,
    }
    name, ref = write_trajectories(layout, trajectories, **{**options, **changes})
    assert ref.path == str(name)
    assert ref.digest == digest_bytes(layout.trajectory(name).read_bytes())
    return layout.trajectory(name)


def groups(*ids: int, samples: int = 3) -> list[Trajectory]:
    return [make(group, sample) for group in ids for sample in range(samples)]


# -- roundtrip ------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_in_order_of_group_and_sample(tmp_path: Path) -> None:
    written = groups(9, 7)
    path = write(tmp_path, list(reversed(written)))
    assert read_trajectories(path) == sorted(written, key=lambda t: (t.group_id, t.sample_index))
    name = TrajectoryName.parse(path.name)
    assert (name.first_group, name.last_group, name.incarnation, name.worker) == (7, 9, 3, "rollout-1")
    assert digest_bytes(path.read_bytes()).removeprefix("xxh128:").startswith(name.tag)
    assert read_metadata(read_table(path)) == METADATA


def test_only_the_asked_groups_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7, 8, 9))
    assert {t.group_id for t in read_trajectories(path, groups=[9, 7])} == {7, 9}
    with pytest.raises(CorruptArtefactError, match=r"expected groups \[12\]"):
        read_trajectories(path, groups={7, 12})


def test_failed_and_mixture_of_experts_samples_survive(tmp_path: Path) -> None:
    failed = make(
        sample=1,
        tokens=(5, 6, 7),
        loss_mask=(False,) * 3,
        logprobs=(0.0,) * 3,
        versions=(),
        weights_digest="",
        response_tokens=0,
        error="ValueError: tool broke",
        finish_reason="abort",
        rewards={},
        messages=(),
        routed_experts=None,
    )
    experts = make(sample=0, routed_experts=tuple(bytes([i, 1]) for i in range(8)))
    path = write(tmp_path, [experts, failed])
    assert read_trajectories(path) == [experts, failed]
    assert str(read_table(path).schema.field("routed_experts").type.value_type) == "fixed_size_binary[2]"


def test_times_are_stored_in_utc(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=5))
    path = write(tmp_path, [make(started=START.astimezone(zone), ended=START.astimezone(zone))])
    assert read_trajectories(path)[0].started == START
    assert read_table(path)["started"][0].as_py().utcoffset() == timedelta(0)


def test_same_trajectories_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert write(tmp_path / "a", groups(1)).read_bytes() == write(tmp_path / "b", groups(1)[::-1]).read_bytes()


def test_writing_the_same_groups_twice_is_one_file(tmp_path: Path) -> None:
    assert write(tmp_path, groups(1)) == write(tmp_path, groups(1))
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


# -- schema ---------------------------------------------------------------------------------------------------------

DESIGN = {
    "group_id": "int64",
    "sample_index": "int32",
    "prompt_id": "string",
    "messages": "list<item: struct<role: string not null, content: string not null, tool_calls: string, "
    "tool_call_id: string> not null>",
    "tokens": "list<item: int32 not null>",
    "loss_mask": "list<item: bool not null>",
    "logprobs": "list<item: float not null>",
    "versions": "list<item: struct<start: int32 not null, version: int64 not null> not null>",
    "weights_digest": "string",
    "reward": "double",
    "rewards": "map<string, double>",
    "finish_reason": "dictionary<values=string, indices=int8, ordered=0>",
    "turns": "int32",
    "error": "string",
    "routed_experts": "list<item: fixed_size_binary[1] not null>",
    "env": "string",
    "seed": "int64",
    "worker": "string",
    "incarnation": "int32",
    "started": "timestamp[us, tz=UTC]",
    "ended": "timestamp[us, tz=UTC]",
    "prompt_tokens": "int32",
    "response_tokens": "int32",
}


def test_schema_is_that_of_the_design() -> None:
    schema = trajectory_schema()
    assert {field.name: str(field.type) for field in schema} == DESIGN
    assert [field.name for field in schema if field.nullable] == ["error", "routed_experts"]
    assert {field.name for field in dataclasses.fields(Trajectory)} == set(schema.names)


def test_plain_pyarrow_reads_the_file_without_this_package(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    code = (
        "import sys, pyarrow as pa\n"
        "table = pa.ipc.open_file(sys.argv[1]).read_all()\n"
        "assert 'milesbatch' not in sys.modules\n"
        "print(table.num_rows, table.schema.metadata[b'milesbatch.format'].decode(), table['finish_reason'][0])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "1.1", "stop"]


# -- damage ---------------------------------------------------------------------------------------------------------


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    data = path.read_bytes()
    lengths = {
        0,
        1,
        5,
        6,
        7,
        8,
        len(data) // 3,
        len(data) // 2,
        *range(0, len(data), 97),
        *range(len(data) - 20, len(data)),
    }
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptArtefactError, match=r"is damaged: expected .*, found xxh128:"):
            read_table(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptArtefactError, match=path.name):
        read_table(path)
    path.unlink()
    with pytest.raises(CorruptArtefactError, match="is missing"):
        read_table(path)


def test_every_bit_flip_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7, samples=1))
    data = path.read_bytes()
    for position in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptArtefactError):
            read_table(path)


def test_truncation_is_found_without_verification_too(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    data = path.read_bytes()
    for length in (0, 5, 9, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptArtefactError, match="cannot be parsed"):
            read_table(path, verify=False)


def test_another_digest_or_a_foreign_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    with pytest.raises(CorruptArtefactError, match=digest_bytes(b"other")):
        read_trajectories(path, digest=digest_bytes(b"other"))
    copy = path.with_name("copy.arrow")
    copy.write_bytes(path.read_bytes())
    with pytest.raises(CorruptArtefactError, match=r"found 'copy\.arrow'"):
        read_table(copy)
    assert read_table(copy, digest=digest_bytes(path.read_bytes())).num_rows == 3
    assert read_table(copy, verify=False).num_rows == 3


def rewrite(path: Path, table: Any) -> Path:
    target = path.with_name("rewritten.arrow")
    with pa.ipc.new_file(target, table.schema) as sink:
        sink.write_table(table)
    return target


def test_a_newer_major_version_stops_the_reader_and_a_newer_minor_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    table = read_table(path)
    newer = rewrite(path, table.replace_schema_metadata({**table.schema.metadata, KEY_FORMAT: b"2.0"}))
    with pytest.raises(FormatVersionError, match=r"rewritten\.arrow: format 2\.0 is newer"):
        read_table(newer, verify=False)
    minor = rewrite(path, table.replace_schema_metadata({**table.schema.metadata, KEY_FORMAT: b"1.9"}))
    assert read_table(minor, verify=False).num_rows == 3


def test_another_schema_is_refused_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, groups(7))
    table = to_table(groups(7), METADATA)
    with pytest.raises(CorruptArtefactError, match=r"logprobs: expected .*, found no such column"):
        read_table(rewrite(path, table.drop_columns(["logprobs"])), verify=False)
    with pytest.raises(CorruptArtefactError, match="format version"):
        read_table(rewrite(path, table.replace_schema_metadata(None)), verify=False)


# -- what may be written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "at least one group"),
        ([make(sample=1), make(sample=2)], r"group 7 is not whole: it has samples \[1, 2\], expected 0 \.\. 1"),
        ([make(sample=0), make(sample=2)], "not whole"),
        ([make(sample=0), make(sample=0)], "not whole"),
        ([*groups(7), make(8, 0)], "group 8 is not whole"),
    ],
)
def test_wrong_group_splits_are_refused(tmp_path: Path, trajectories: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path, trajectories)
    assert list((tmp_path / "trajectories").iterdir()) == []


def test_a_stated_group_size_is_held(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 0 \.\. 3"):
        write(tmp_path, groups(7, samples=3), samples_per_group=4)


def test_rows_of_another_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout-2"):
        write(tmp_path, groups(7), worker="rollout-2")
    with pytest.raises(ValueError, match="incarnation 4"):
        write(tmp_path, groups(7), incarnation=4)


def test_a_fenced_writer_commits_nothing(tmp_path: Path) -> None:
    def fenced() -> None:
        raise FencedError("a newer incarnation has taken over")

    with pytest.raises(FencedError):
        write(tmp_path, groups(7), before_commit=fenced)
    assert list((tmp_path / "trajectories").iterdir()) == []


def test_files_are_listed_by_group_and_foreign_names_left_out(tmp_path: Path) -> None:
    assert list(iterate_files(RunLayout(tmp_path))) == []
    late = write(tmp_path, groups(1_000_000))
    early = write(tmp_path, groups(999_999))
    (tmp_path / "trajectories" / ".tmp-1-abc").write_bytes(b"half")
    (tmp_path / "trajectories" / "notes.txt").write_text("mine")
    assert list(iterate_files(RunLayout(tmp_path))) == [early, late]


# -- validation -----------------------------------------------------------------------------------------------------

NAN = float("nan")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"loss_mask": (True,)}, "loss_mask has 1 entries for 8 tokens"),
    ({"logprobs": ()}, "logprobs has 0 entries"),
    ({"logprobs": (0.0, 0.0, 0.0, NAN, -1.0, 0.0, -1.0, -1.0)}, r"logprobs\[3\] is nan"),
    ({"logprobs": (0.0, 0.0, 0.0, 0.5, -1.0, 0.0, -1.0, -1.0)}, r"logprobs\[3\] is 0\.5"),
    ({"logprobs": (0.0, -1.0, 0.0, -0.5, -1.0, 0.0, -1.0, -1.0)}, r"logprobs\[1\] is -1\.0 where loss_mask is false"),
    ({"tokens": (5, 6, 7, 8, 9, 10, 11, -1)}, r"tokens\[7\] is -1"),
    ({"prompt_tokens": 2}, r"2 \+ 5, but there are 8"),
    ({"prompt_tokens": 4, "response_tokens": 4}, "loss_mask is first true at 3"),
    ({"versions": ()}, "versions is empty"),
    ({"versions": (VersionSpan(0, 4),)}, "begin at token 0"),
    ({"versions": (VersionSpan(3, 4), VersionSpan(5, 5))}, "token 5, which the policy did not write"),
    ({"versions": (VersionSpan(3, 4), VersionSpan(60, 5))}, "token 60"),
    ({"versions": (VersionSpan(3, 4), VersionSpan(6, 4))}, "do not ascend"),
    ({"versions": (VersionSpan(3, -1),)}, "versions.version is -1"),
    ({"weights_digest": "abc"}, "not a digest"),
    ({"reward": NAN}, "reward is nan"),
    ({"rewards": {"a": float("inf")}}, r"rewards\['a'\] is inf"),
    ({"finish_reason": ""}, "finish_reason"),
    ({"error": ""}, "error is empty"),
    ({"env": {"x": {1}}}, "env is not made of JSON values"),
    ({"env": {"x": NAN}}, "JSON"),
    ({"worker": "Worker"}, "not a process name"),
    ({"started": datetime(2025, 1, 1)}, "started has no time zone"),
    ({"group_id": -1}, "group_id is -1"),
    ({"seed": 2**63}, "seed is"),
    ({"routed_experts": (b"a",)}, "1 entries for 8 tokens"),
    ({"routed_experts": (b"a",) * 7 + (b"ab",)}, "same positive width"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_an_inconsistent_trajectory_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    trajectory = dataclasses.replace(make(), **changes)
    with pytest.raises(ValueError, match=message) as caught:
        trajectory.validate()
    assert f"group {trajectory.group_id}, sample 0" in str(caught.value)
    with pytest.raises(ValueError):
        write(tmp_path, [trajectory], worker=trajectory.worker)


def test_a_consistent_trajectory_passes() -> None:
    make().validate()
    assert make().policy_tokens == 4
