"""Promise 1: no group has two fates, whatever the batch records say."""

from __future__ import annotations

import pytest
from builders import make_batch, make_ref, make_rejection
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.decisions.fates import Fate, FateTable
from milesbatch.errors import CorruptArtefactError

steps = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=5), st.lists(st.integers(0, 30), max_size=3)), max_size=6
)


@given(steps)
def test_a_second_fate_is_refused_and_changes_nothing(content: list[tuple[list[int], list[int]]]) -> None:
    table, model = FateTable(), {}
    for step, (trained, rejected) in enumerate(content, start=1):
        record = make_batch(step, [make_ref(g) for g in trained], [make_rejection(g) for g in rejected])
        names = trained + rejected
        if len(set(names)) < len(names) or set(names) & set(model):
            with pytest.raises(CorruptArtefactError, match=f"batch(?: record)? {step}"):
                table.add(record)
            assert table.last_step == step - 1
            assert table.fates == model
            return
        table.add(record)
        model |= {g: Fate(step) for g in trained} | {g: Fate(step, "stale") for g in rejected}
        assert table.fates == model
        assert table.last_step == step
        assert all(table.is_pending(g) == (g not in model) for g in range(40))
        assert table.is_pending(table.stream_position)
        assert table.stream_position == max(model, default=-1) + 1
    assert (
        FateTable.of(
            make_batch(i, [make_ref(g) for g in t], [make_rejection(g) for g in r])
            for i, (t, r) in enumerate(content, 1)
        )
        == table
    )


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_records_come_in_order(step: int) -> None:
    table = FateTable.of([make_batch(1, [make_ref(0)])])
    with pytest.raises(CorruptArtefactError, match=f"batch record {step} follows record 1"):
        table.add(make_batch(step, [make_ref(1)]))


def test_text() -> None:
    assert [str(Fate(3)), str(Fate(4, "stale"))] == ["trained(3)", "rejected(stale, 4)"]
    assert FateTable().stream_position == 0
