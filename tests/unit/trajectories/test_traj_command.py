"""``milesbatch traj``: lists, conversations and statistics, also when a file is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from builders import make_run
from typer.testing import CliRunner, Result

from milesbatch.cli import traj
from milesbatch.cli.conversation import visible
from milesbatch.engines.protocol import VersionSpan
from milesbatch.errors import CorruptArtefactError, InputError, UsageError
from milesbatch.records import BatchRecord, FileRef, GroupRef, Rejection, digest_bytes
from milesbatch.store.durable import create_exclusively
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Message, Trajectory
from milesbatch.trajectories.writer import write_trajectories

NOW = datetime(2025, 3, 1, 12, tzinfo=UTC)


def sample(group: int, index: int, *, incarnation: int = 1, version: int = 0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "group_id": group,
        "sample_index": index,
        "prompt_id": f"p{group}",
        "messages": (Message("user", "2+2="), Message("assistant", "4")),
        "tokens": (0, 1, 2),
        "loss_mask": (False, True, True),
        "logprobs": (0.0, -0.05, -4.0),
        "versions": (VersionSpan(1, version),),
        "weights_digest": digest_bytes(b"w"),
        "reward": float(index),
        "rewards": {"answer": float(index)},
        "finish_reason": "stop",
        "turns": 1,
        "seed": 5,
        "worker": "rollout-0",
        "incarnation": incarnation,
        "started": NOW,
        "ended": NOW,
        "prompt_tokens": 1,
        "response_tokens": 2,
    }
    return Trajectory(**{**values, **changes})


def commit(layout: RunLayout, trajectories: list[Trajectory], incarnation: int = 1) -> FileRef:
    metadata = FileMetadata("run", "", "")
    _, ref = write_trajectories(
        layout,
        trajectories,
        incarnation=incarnation,
        worker="rollout-0",
        metadata=metadata,
        before_commit=lambda: None,
    )
    return ref


def batch(layout: RunLayout, step: int, trained: list[GroupRef], rejected: list[Rejection]) -> None:
    record = BatchRecord(
        step=step,
        incarnation=1,
        trained=tuple(trained),
        rejected=tuple(rejected),
        stream_position=0,
        created_at="2025-03-01T12:00:00Z",
    )
    create_exclusively(layout.batch(step), record.to_bytes())


def group_ref(group: int, ref: FileRef, version: int) -> GroupRef:
    return GroupRef(
        group_id=group,
        path=ref.path,
        digest=ref.digest,
        content=ref.digest,
        version_min=version,
        version_max=version,
        samples=2,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """Groups 0 and 1 in one file, 2 in another, 3 twice (two incarnations); steps 1 and 2 have batch records."""
    layout = make_run(tmp_path / "run")
    first = commit(layout, [sample(g, i) for g in (0, 1) for i in (0, 1)])
    failed = sample(2, 1, version=1, error="ValueError: no number", reward=0.0)
    second = commit(layout, [sample(2, 0, version=1, reward=0.5), failed])
    commit(layout, [sample(3, i) for i in (0, 1)])
    commit(layout, [sample(3, i, incarnation=2, version=1) for i in (0, 1)], incarnation=2)
    rejection = Rejection(group_id=1, reason="zero_variance", path=first.path, digest=first.digest)
    batch(layout, 1, [group_ref(0, first, 0)], [rejection])
    batch(layout, 2, [group_ref(2, second, 0)], [])
    return layout


def call(*arguments: object) -> Result:
    return CliRunner().invoke(traj.app, [str(argument) for argument in arguments])


def file_of(run: RunLayout, first_group: int) -> Path:
    return next(run.trajectories.glob(f"{first_group:06d}-*"))


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


# -- ls -------------------------------------------------------------------------------------------------------------


def test_ls_lists_every_file(run: RunLayout) -> None:
    result = call("ls", run.root, "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["group_ids"] for row in rows] == [[0, 1], [2], [3], [3]]
    first = rows[0]
    assert (first["groups"], first["trajectories"], first["worker"]) == (2, 4, "rollout-0")
    assert [row["incarnation"] for row in rows] == [1, 1, 1, 2]
    assert (rows[3]["versions"], rows[1]["failed"]) == ([1], 1)
    assert first["bytes"] == Path(first["path"]).stat().st_size
    assert "4 files, 10 trajectories" in " ".join(call("ls", run.root).stdout.split())


def test_ls_knows_what_became_of_the_groups(run: RunLayout) -> None:
    rows = json.loads(call("ls", run.root, "--json").stdout)
    fates = [(row["trained"], row["rejected"], row["pending"], row["steps"]) for row in rows]
    assert fates == [(1, 1, 0, [1]), (1, 0, 0, [2]), (0, 0, 1, []), (0, 0, 0, [])]
    assert [row["uncounted"] for row in rows] == [None, None, None, "another file holds the same groups"]
    shown = " ".join(call("ls", run.root).stdout.split())
    assert "1 trained, 1 rejected" in shown and "2 groups trained, 1 rejected, 1 pending" in shown


def test_ls_names_a_file_that_a_batch_record_names_and_that_is_gone(run: RunLayout) -> None:
    gone = file_of(run, 2)
    gone.unlink()
    result = call("ls", run.root, "--json")
    assert (result.exit_code, len(json.loads(result.stdout))) == (1, 3)
    assert gone.name in result.stderr and "is missing" in result.stderr


def test_a_long_list_is_cut_on_the_terminal_and_says_so(run: RunLayout) -> None:
    for group in range(100, 140):
        commit(run, [sample(group, 0)])
    shown = " ".join(call("ls", run.root).stdout.split())
    assert "44 files" in shown and "4 earlier files are not shown (--all)" in shown and "000002-000002" not in shown
    assert "000002-000002" in call("ls", run.root, "--all").stdout


def test_ls_reports_a_damaged_file_and_lists_the_rest(run: RunLayout) -> None:
    damage(file_of(run, 2))
    result = call("ls", run.root, "--json")
    assert result.exit_code == 1
    assert [row["group_ids"] for row in json.loads(result.stdout)] == [[0, 1], [3], [3]]
    assert file_of(run, 2).name in result.stderr and "is damaged: expected" in result.stderr


def test_a_run_without_trajectories_is_an_empty_list(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for command in ("ls", "stats"):
        result = call(command, tmp_path / "run", "--json")
        assert (result.exit_code, json.loads(result.stdout)) == (0, [])


# -- show -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "fate", "step"),
    [(0, "trained(1)", 1), (1, "rejected(zero_variance, 1)", 1), (2, "trained(2)", 2), (3, "pending", None)],
)
def test_show_knows_the_fate_of_a_group(run: RunLayout, group: int, fate: str, step: int | None) -> None:
    result = call("show", run.root, group, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["fate"], document["step"]) == (0, fate, step)
    assert [entry["sample_index"] for entry in document["samples"]] == [0, 1]
    assert f"group {group}: {fate}" in call("show", run.root, group).stdout


def test_show_of_a_pending_group_takes_the_file_that_a_take_over_would_take_and_names_the_other(run: RunLayout) -> None:
    document = json.loads(call("show", run.root, 3, "--json").stdout)
    assert document["samples"][0]["versions"] == [{"start": 1, "version": 0}]
    assert len(document["others"]) == 1 and ".i000002." in document["others"][0]


def test_show_of_a_pending_group_falls_back_to_a_readable_file(run: RunLayout) -> None:
    damage(next(run.trajectories.glob("000003-*.i000001.*")))
    result = call("show", run.root, 3, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["samples"][0]["incarnation"] == 2
    assert "is damaged" in result.stderr


@pytest.mark.parametrize("colour", ["logprob", "mask", "version", "none"])
def test_show_prints_a_conversation_without_a_tokenizer(run: RunLayout, colour: str) -> None:
    result = call("show", run.root, 2, "--sample", 1, "--colour", colour)
    assert result.exit_code == 0
    for text in ("user: 2+2=", "assistant: 4", "answer 1", "failed: ValueError: no number", "tokens: 0 1 2", "1 from"):
        assert text in result.stdout, text
    assert "sample 0" not in result.stdout


def test_show_spells_tokens_with_the_tokenizer_of_the_run(run: RunLayout) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero")).save(str(run.model / "tokenizer.json"))
    assert "tokens: zeroonetwo" in call("show", run.root, 0).stdout
    (run.model / "tokenizer.json").write_text("{")
    result = call("show", run.root, 0)
    assert result.exit_code == 1
    assert "tokens: 0 1 2" in result.stdout and "not a readable tokenizer" in result.stderr


def test_show_lets_no_control_sequence_through(run: RunLayout) -> None:
    commit(run, [sample(9, i, messages=(Message("user", "a\x1b[31m[bold]b\x9b\u202ec"),)) for i in (0, 1)])
    out = call("show", run.root, 9, "--sample", 0).stdout
    assert "\x1b" not in out and "\x9b" not in out and "\u202e" not in out
    assert r"a\x1b[31m[bold]b" in out
    assert visible("a\tb\nc\r") == "a\tb\nc\\r"


def test_show_of_what_is_not_there_is_explained(run: RunLayout) -> None:
    with pytest.raises(InputError, match="no readable trajectories of group 77"):
        raise_of(call("show", run.root, 77))
    with pytest.raises(InputError, match="group 0 has no sample 9"):
        raise_of(call("show", run.root, 0, "--sample", 9))
    damage(file_of(run, 0))
    with pytest.raises(CorruptArtefactError, match="is damaged"):
        raise_of(call("show", run.root, 0))


def test_show_chooses_samples_of_a_step(run: RunLayout) -> None:
    result = call("show", run.root, "--step", 1, "--best", 1, "--worst", 2, "--json")
    document = json.loads(result.stdout)
    assert [(entry["kind"], entry["group_id"], entry["sample"]["sample_index"]) for entry in document] == [
        ("best", 0, 1),
        ("worst", 0, 0),
        ("worst", 1, 0),
    ]
    assert document[2]["fate"] == "rejected(zero_variance, 1)"
    shown = call("show", run.root, "--step", 2, "--odd", 1).stdout
    assert "sample 1, trained(2)" in shown and "the last episode that failed" in shown and "staleness 0" in shown
    assert "best: highest reward" in call("show", run.root, "--step", 1).stdout


def test_show_wants_to_know_which_samples(run: RunLayout) -> None:
    for arguments in ((), (0, "--step", 1), (0, "--best", 1), ("--step", 1, "--sample", 0)):
        with pytest.raises(UsageError, match="which samples"):
            raise_of(call("show", run.root, *arguments))
    with pytest.raises(InputError, match="no trajectory counts for step 9"):
        raise_of(call("show", run.root, "--step", 9))


def test_show_spells_tool_calls(run: RunLayout) -> None:
    call_text = '[{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]'
    messages = (
        Message("user", "1+1"),
        Message("assistant", "", tool_calls=call_text),
        Message("tool", "2", tool_call_id="c1"),
        Message("assistant", "2", tool_calls="not json"),
    )
    commit(run, [sample(9, 0, messages=messages)])
    shown = call("show", run.root, 9).stdout
    for text in ('calls add({"a": 1}) [c1]', "tool (c1): 2", "calls not json"):
        assert text in shown, text


def raise_of(result: Result) -> None:
    assert result.exception is not None
    raise result.exception


# -- stats ----------------------------------------------------------------------------------------------------------


def test_stats_join_trajectories_with_batch_records(run: RunLayout) -> None:
    result = call("stats", run.root, "--json")
    assert result.exit_code == 0
    first, second = json.loads(result.stdout)
    expected = {
        "step": 1,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "length_mean": 2.0,
        "staleness_mean": 0.0,
        "failed": 0,
        "trained": 1,
        "rejected": 1,
        "rejected_by_reason": {"zero_variance": 1},
        "reward_max": 1.0,
        "length_max": 2,
        "samples": 4,
        "finish_reasons": {"stop": 4},
        "response_tokens": 8,
        "tokens_per_s": None,
    }
    assert {key: first[key] for key in expected} == expected
    assert second["failed_by_cause"] == {"ValueError: no number": 1}
    assert (second["reward_mean"], second["failed"], second["staleness_mean"]) == (0.5, 1, 1.0)
    shown = call("stats", run.root).stdout
    for text in ("2 train steps", "8 trajectories in groups: 2 trained", "reward (p05", "failed, by cause", "█"):
        assert text in shown, text


def test_stats_of_the_whole_run(run: RunLayout) -> None:
    document = json.loads(call("stats", run.root, "--overall", "--json").stdout)
    assert (document["trajectories"], document["failed"]) == (8, 1)
    assert document["groups"] == {"trained": 2, "rejected": 1, "pending": 1}
    assert document["reward"]["histogram"][0] == {"from": 0.0, "to": 0.0, "count": 3}
    assert (document["length"]["p50"], document["staleness"]["max"]) == (2.0, 0.0)
    assert "train steps" not in call("stats", run.root, "--overall").stdout


def test_stats_of_a_damaged_file_are_null_and_the_rest_stays(run: RunLayout) -> None:
    damage(file_of(run, 2))
    result = call("stats", run.root, "--json")
    first, second = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (first["reward_mean"], second["reward_mean"], second["trained"]) == (0.5, None, 1)
    assert result.stderr.count("is damaged") == 1
    assert call("stats", run.root).exit_code == 1


def test_a_damaged_batch_record_is_reported_and_the_rest_shown(run: RunLayout) -> None:
    run.batch(1).write_bytes(b"{}")
    result = call("stats", run.root, "--json")
    assert result.exit_code == 1
    assert [step["step"] for step in json.loads(result.stdout)] == [2]
    assert "000001.json" in result.stderr


def test_the_command_imports_without_torch() -> None:
    code = "import sys, milesbatch.cli.traj, milesbatch.cli.recipes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
