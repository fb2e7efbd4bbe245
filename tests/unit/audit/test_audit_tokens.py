"""Tokens and logprobs that no model can have drawn are found by everybody who comes by: worker, trainer, audit."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from builders import make_layout, make_trajectory, write_groups

from milesbatch.audit.columns import read_facts
from milesbatch.errors import CorruptArtefactError
from milesbatch.records import digest_bytes
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trainer.batch import read_groups
from milesbatch.trajectories.schema import FileMetadata, to_table
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.vocabulary import vocabulary_of
from milesbatch.trajectories.writer import commit_table, write_trajectories

METADATA = FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template"))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


def has_vocabulary(layout: RunLayout, size: int) -> None:
    layout.model.mkdir(parents=True, exist_ok=True)
    (layout.model / "config.json").write_text(json.dumps({"vocab_size": size}))


def spoiled(token: int | None = None, logprob: float | None = None) -> Trajectory:
    good = make_trajectory(0)
    tokens, logprobs = list(good.tokens), list(good.logprobs)
    tokens[-1] = tokens[-1] if token is None else token
    logprobs[-1] = logprobs[-1] if logprob is None else logprob
    return dataclasses.replace(good, tokens=tuple(tokens), logprobs=tuple(logprobs))


def problems(layout: RunLayout, row: Trajectory, vocabulary: int | None) -> list[str]:
    """What the audit says of a file that was committed without a look at it."""
    table = to_table([row], METADATA)
    name, ref = commit_table(layout.trajectories, table, (0, 0), row.incarnation, row.worker, lambda: None)
    path = layout.trajectory(str(name))
    return read_facts(path, path.read_bytes(), ref.digest, TrajectoryName.parse(path.name), None, vocabulary).problems


def test_the_model_says_how_many_token_ids_it_has(layout: RunLayout) -> None:
    assert vocabulary_of(layout.model) is None
    has_vocabulary(layout, 512)
    assert vocabulary_of(layout.model) == 512
    for text in ("", "[]", "{}", '{"vocab_size": "512"}', '{"vocab_size": -1}', "\xff"):
        (layout.model / "config.json").write_text(text, "latin-1")
        assert vocabulary_of(layout.model) is None


def test_a_worker_commits_no_token_that_the_model_has_not(layout: RunLayout) -> None:
    row = spoiled(token=10_000_000)
    has_vocabulary(layout, 512)
    with pytest.raises(
        ValueError, match=r"group 0, sample 0: tokens\[4\] is 10000000, and the model has token ids 0 .. 511"
    ):
        write_trajectories(
            layout, [row], incarnation=row.incarnation, worker=row.worker, metadata=METADATA, before_commit=lambda: None
        )
    assert not list(layout.trajectories.iterdir())


@pytest.mark.parametrize("logprob", [5.0, -1e300, -1e30, math.nan, math.inf, -math.inf])
def test_a_worker_commits_no_logprob_that_is_none(layout: RunLayout, logprob: float) -> None:
    row = spoiled(logprob=logprob)
    with pytest.raises(ValueError, match=r"logprobs\[4\] is .* not the logarithm of a probability"):
        row.validate()
    assert any("it has logprobs" in problem for problem in problems(layout, row, 512))


def test_the_trainer_names_file_and_group(layout: RunLayout) -> None:
    (ref,) = write_groups(layout, [0])
    most = max(max(row.tokens) for row in read_groups(layout, [ref])[0])
    has_vocabulary(layout, most + 1)
    assert list(read_groups(layout, [ref])) == [0]
    has_vocabulary(layout, most)
    with pytest.raises(
        CorruptArtefactError, match=rf"{ref.path} cannot be trained on: trajectory of group 0"
    ) as caught:
        read_groups(layout, [ref])
    assert f"is {most}, and the model has token ids 0 .. {most - 1}" in str(caught.value)


def test_an_audit_finds_tokens_that_the_model_has_not(layout: RunLayout) -> None:
    assert problems(layout, make_trajectory(0), 512) == []
    assert problems(layout, spoiled(token=10_000_000), None) == []
    (found,) = problems(layout, spoiled(token=512), 512)
    assert "the model has token ids 0 .. 511" in found
    for vocabulary in (None, 512):
        assert any("it has tokens -7 to" in problem for problem in problems(layout, spoiled(token=-7), vocabulary))
