"""Files of the faulty operations behave as the real ones: other libraries write through them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from milesbatch.faults.operations import FaultyOperations
from milesbatch.store.operations import Operations, installed


@pytest.fixture
def passed() -> list[str]:
    return []


@pytest.fixture
def faulty(tmp_path: Path, passed: list[str]) -> Iterator[Path]:
    (tmp_path / "trajectories").mkdir()
    operations = FaultyOperations(tmp_path, passed.append, lambda name: None, lambda name, path: None)
    with installed(operations):
        yield tmp_path / "trajectories"


def test_arrow_writes_the_same_bytes(faulty: Path, passed: list[str]) -> None:
    table = pa.table({"a": list(range(1000))})
    for operations, name in ((Operations(), "plain"), (None, "faulty")):
        from milesbatch.store.operations import current

        with (operations or current()).create(faulty / name) as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    assert (faulty / "plain").read_bytes() == (faulty / "faulty").read_bytes()
    assert passed[0] == "create:trajectories"
    assert passed.count("write:trajectories") > 1


def test_seek_tell_and_close(faulty: Path) -> None:
    from milesbatch.store.operations import current

    with current().create(faulty / "x") as stream:
        assert stream.write(b"hello") == 5
        assert stream.tell() == 5
        assert stream.seek(1) == 1
        stream.write(b"E")
        current().sync_file(faulty / "x", stream)
        assert (faulty / "x").read_bytes() == b"hEllo"
    assert stream.closed


def test_a_name_that_exists_stays_refused(faulty: Path) -> None:
    from milesbatch.store.operations import current

    (faulty / "x").write_bytes(b"1")
    with pytest.raises(FileExistsError):
        current().create(faulty / "x")
