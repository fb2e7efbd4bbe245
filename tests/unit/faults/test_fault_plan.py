"""Fault plans: what they say is what happens, and what they cannot say is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from milesbatch.errors import InputError
from milesbatch.faults.plan import Fault, load_plan
from milesbatch.faults.points import POINTS


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def one(line: str) -> str:
    return f"faults:\n  - {line}\n"


def test_a_plan_is_read(tmp_path: Path) -> None:
    text = one("{name: a, role: trainer-0, point: trainer.recorded, nth: 3, action: kill}") + (
        '  - {name: b, role: rollout, point: "sync_file:trajectories", action: enospc, times: 4}\n'
    )
    first, second = load_plan(write(tmp_path / "plan.yaml", text)).faults
    assert first == Fault(name="a", role="trainer-0", point="trainer.recorded", nth=3, action="kill")
    assert (second.nth, second.times, second.action) == (1, 4, "enospc")


GOOD = {"name": "a", "role": "trainer-0", "point": "trainer.recorded", "action": "kill"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "A b"}, ["faults[0].name", "A b"]),
        ({"role": "trainr"}, ["faults[0].role", "trainr"]),
        ({"role": "trainer-01"}, ["faults[0].role", "trainer-01"]),
        ({"point": "trainer.record"}, ["faults[0]", "trainer.record", "trainer.recorded"]),
        ({"point": "write:everything"}, ["write:everything", "KIND"]),
        ({"point": "scribble:weights"}, ["scribble:weights", "OPERATION"]),
        ({"nth": 0}, ["faults[0].nth", "0"]),
        ({"nth": "2"}, ["faults[0].nth", "'2'"]),
        ({"nth": True}, ["faults[0].nth", "True"]),
        ({"action": "explode"}, ["faults[0].action", "explode", "kill"]),
        ({"action": "enospc"}, ["enospc", "OPERATION:KIND", "trainer.recorded"]),
        ({"action": "flip", "point": "write:weights"}, ["flip", "link:KIND"]),
        ({"action": "partition"}, ["partition", "wire.send"]),
        ({"action": "delay", "seconds": -1.0}, ["faults[0].seconds", "-1"]),
        ({"action": "exit", "exit_code": 256}, ["faults[0].exit_code", "256"]),
        ({"time": 3}, ["faults[0].time", "3"]),
    ],
)
def test_what_is_not_possible_is_named(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    import yaml

    path = write(tmp_path / "plan.yaml", yaml.safe_dump({"faults": [{**GOOD, **changes}]}))
    with pytest.raises(InputError) as caught:
        load_plan(path)
    assert caught.value.exit_code == 2
    for word in (str(path), *words, "docs/faults.md"):
        assert word in str(caught.value)


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    import yaml

    body = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(InputError, match=rf"faults\[0\]\.{missing}"):
        load_plan(write(tmp_path / "plan.yaml", yaml.safe_dump({"faults": [body]})))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    text = one("{name: a, role: nobody, point: trainer.recorded, action: kill, nth: 0}")
    with pytest.raises(InputError, match=r"(?s)faults\[0\]\.role.*faults\[0\]\.nth"):
        load_plan(write(tmp_path / "plan.yaml", text))


def test_names_must_differ(tmp_path: Path) -> None:
    line = "  - {name: twin, role: trainer-0, point: trainer.recorded, action: kill}\n"
    with pytest.raises(InputError, match="twin"):
        load_plan(write(tmp_path / "plan.yaml", "faults:\n" + 2 * line))


@pytest.mark.parametrize("text", ["", "[1, 2]", "faults: 3", "faults: [", "a: b: c", "faults: [2026-01-01]"])
def test_what_is_no_plan(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"plan\.yaml"):
        load_plan(write(tmp_path / "plan.yaml", text))


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.yaml"):
        load_plan(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.yaml"):
        load_plan(tmp_path / "binary.yaml")


def test_a_role_means_any_of_its_processes() -> None:
    fault = Fault(name="a", role="trainer", point="trainer.recorded", action="kill")
    assert fault.is_for("trainer-0") and fault.is_for("trainer-7")
    assert not fault.is_for("rollout-0") and not fault.is_for("controller-0")
    assert not Fault(name="a", role="trainer-1", point="trainer.recorded", action="kill").is_for("trainer-10")


def test_every_point_is_really_passed_somewhere() -> None:
    """A point that no code passes would make plans that never fire."""
    package = Path(__file__).parents[3] / "milesbatch"
    text = "".join(path.read_text() for path in package.rglob("*.py") if path.parent.name != "faults")
    assert [name for name in POINTS if f'point("{name}")' not in text] == []
