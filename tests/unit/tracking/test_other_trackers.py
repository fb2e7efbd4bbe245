"""TensorBoard and W&B through the same protocol, the machine's figures, and a tracker that fails for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_follow_events import RECIPE, run, write_steps  # noqa: F401 - a fixture

from milesbatch.errors import StorageError
from milesbatch.store.run import OpenRun
from milesbatch.tracking import follow as following
from milesbatch.tracking.evaluations import EvaluationEntry
from milesbatch.tracking.follow import follow
from milesbatch.tracking.machine import machine_figures
from milesbatch.tracking.tensorboard_tracker import TensorboardTracker
from milesbatch.tracking.wandb_tracker import WandbTracker


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(directory))
    found.Reload()
    return [(event.step, round(event.value, 5)) for event in found.Scalars(name)]


def test_tensorboard_has_each_step_once_over_incarnations(run: OpenRun) -> None:  # noqa: F811
    place = run.layout.tracking / "tensorboard"
    write_steps(run, 1, range(1, 4), range(0), None)
    first = TensorboardTracker(place)
    first.log_step(1, "2026-01-01T00:00:00.000000Z", {"reward_mean": 0.1, "loss": -0.01})
    write_steps(run, 2, range(2, 7), range(2, 4), "finished")
    follow(run.layout, 2, lambda: TensorboardTracker(place))
    assert scalars(place, "reward_mean") == [(step, round(step / 10, 5)) for step in range(1, 7)]
    assert TensorboardTracker(place).last_step() == 6


def test_wandb_goes_on_with_the_same_run_offline(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_steps(run, 1, range(1, 4), range(0), "stopped")
    follow(run.layout, 1, lambda: WandbTracker(run, run.layout.tracking))
    write_steps(run, 2, range(3, 7), range(3, 4), "finished")
    follow(run.layout, 2, lambda: WandbTracker(run, run.layout.tracking))
    runs = sorted((run.layout.tracking / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    # offline-run-TIME-ID, and a number after it when both began in the same second
    assert len({path.name.split("-")[3] for path in runs}) == 1, "both are parts of one W&B run"
    assert (run.layout.tracking / "wandb-last-step").read_bytes() == b"6"


class Flaky:
    """A place that fails as often as it is told to, and then keeps what it gets."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.steps: list[int] = []
        self.metrics: list[dict[str, float]] = []
        self.closed = ""

    def last_step(self) -> int:
        return max(self.steps, default=0)

    def evaluated(self) -> frozenset[int]:
        return frozenset()

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        raise AssertionError("there is none")

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        if step == 3 and self.failures:
            self.failures -= 1
            raise StorageError("the server does not answer")
        self.steps.append(step)
        self.metrics.append(metrics)

    def close(self, status: str) -> None:
        self.closed = status


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_PAUSE_S", 0.05)
    monkeypatch.setattr(following, "_POLL_S", 0.02)
    monkeypatch.setattr(following, "_LAST_TRIES_S", 2.0)


@pytest.mark.usefixtures("quickly")
def test_a_server_that_is_away_for_a_while_loses_nothing(run: OpenRun, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_steps(run, 1, range(1, 7), range(0), "finished")
    place = Flaky(failures=3)
    follow(run.layout, 1, lambda: place)
    assert (place.steps, place.closed) == ([1, 2, 3, 4, 5, 6], "finished")
    assert "4 steps wait: the server does not answer" in capfd.readouterr().err


@pytest.mark.usefixtures("quickly")
def test_one_that_stays_away_is_named_and_the_next_start_logs_all(run: OpenRun) -> None:  # noqa: F811
    write_steps(run, 1, range(1, 7), range(0), "stopped")
    place = Flaky(failures=10**9)
    with pytest.raises(StorageError, match="does not answer"):
        follow(run.layout, 1, lambda: place)
    place.failures = 0
    write_steps(run, 2, range(6, 9), range(6, 7), "finished")
    follow(run.layout, 2, lambda: place)
    assert place.steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_figures_of_this_machine(tmp_path: Path) -> None:
    found = machine_figures(tmp_path)
    assert 0 <= found["system/memory_percent"] <= 100
    assert found["system/disk_free_gib"] > 0
    assert "system/disk_free_gib" not in machine_figures(tmp_path / "gone")


@pytest.mark.usefixtures("quickly")
def test_new_steps_carry_the_machines_figures(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(following, "_POLL_S", -1.0)
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    write_steps(run, 1, range(1, 3), range(1, 2), "finished")
    place = Flaky(0)
    follow(run.layout, 1, lambda: place, lambda: {"system/x": 1.0})
    assert ["system/x" in metrics for metrics in place.metrics] == [False, True]
    assert RECIPE.tracking.kind == "mlflow"
