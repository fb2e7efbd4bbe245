"""Ids: one text form each; parsers take exactly what the printer writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.errors import (
    EXIT_NOT_WELL,
    EXIT_TEMPFAIL,
    EXIT_USAGE,
    CorruptArtefactError,
    FencedError,
    MilesbatchError,
    RecipeError,
    RunHeldError,
    RunMismatchError,
)
from milesbatch.ids import PolicyRef, check_digest, check_worker_name, number, parse_number
from milesbatch.store.layout import TrajectoryName

DIGEST = "xxh128:" + "0123456789abcdef" * 2


@given(st.integers(0, 10**9))
def test_numbers(value: int) -> None:
    assert parse_number(number(value)) == value


@given(st.lists(st.integers(0, 999_999)))
def test_numbers_sort_as_text(values: list[int]) -> None:
    assert [parse_number(text) for text in sorted(map(number, values))] == sorted(values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "00001",
        "0000001",
        "-00001",
        "+00001",
        " 00001",
        "000001\n",
        "00000a",
        "\u0660\u0660\u0660\u0660\u0660\u0661",
        "9" * 5000,
    ],
)
def test_numbers_are_strict(text: str) -> None:
    with pytest.raises(ValueError):
        parse_number(text)


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="-1"):
        number(-1)


@pytest.mark.parametrize("check", [check_digest, PolicyRef.parse, check_worker_name, TrajectoryName.parse])
@pytest.mark.parametrize(
    "text",
    [
        "",
        DIGEST + "\n",
        DIGEST.upper(),
        DIGEST[:-1],
        DIGEST + "0",
        "md5:" + "0" * 32,
        f"run@3:{DIGEST}\n",
        f"run@\u0663:{DIGEST}",
        f"run@03:{DIGEST}",
        f"run@-3:{DIGEST}",
        f"ru n@3:{DIGEST}",
        "rollout-0\n",
        "rollout-\u0663",
        "rollout-00",
        "rollout-",
        "-0",
        "Rollout-0",
        "../rollout-0",
        "000000-000001.i000001.rollout-0.0123456789abcdef.arrow\n",
        "0000000-000001.i000001.rollout-0.0123456789abcdef.arrow",
        "000000-000001.i0000001.rollout-0.0123456789abcdef.arrow",
        "000000-\u0660\u0660\u0660\u0660\u06601.i000001.rollout-0.0123456789abcdef.arrow",
        "000000-000001.i000001.---0.0123456789abcdef.arrow",
        "000002-000001.i000001.rollout-0.0123456789abcdef.arrow",
        "000000-000001.i000001.rollout-0.0123456789ABCDEF.arrow",
        "x/000000-000001.i000001.rollout-0.0123456789abcdef.arrow",
    ],
)
def test_strict_parsers(check: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError):
        check(text)


@given(st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True), st.integers(0, 10**12))
def test_policy_ref(run_id: str, version: int) -> None:
    ref = PolicyRef(run_id, version, DIGEST)
    assert PolicyRef.parse(str(ref)) == ref


@given(st.integers(0, 10**8), st.integers(0, 100), st.integers(1, 10**7), st.integers(0, 200))
def test_trajectory_names(first: int, more: int, incarnation: int, worker: int) -> None:
    name = TrajectoryName(first, first + more, incarnation, f"rollout-{worker}", "0123456789abcdef")
    assert TrajectoryName.parse(str(name)) == name


def test_errors_say_what_to_do_and_how_to_exit() -> None:
    assert str(CorruptArtefactError("x is damaged", mend="run audit")) == "x is damaged\n  what to do: run audit"
    assert str(CorruptArtefactError("x is damaged")) == "x is damaged"
    assert {RunHeldError.exit_code, FencedError.exit_code} == {EXIT_TEMPFAIL} == {75}
    assert {RecipeError.exit_code, RunMismatchError.exit_code} == {EXIT_USAGE}
    assert CorruptArtefactError.exit_code == MilesbatchError.exit_code == EXIT_NOT_WELL
