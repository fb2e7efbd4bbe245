"""Plot the reward of a run by step: ``python benchmarks/plot_run.py RUN -o docs/images/NAME.png``.

Prints the mean reward of the first and last steps and the slope of a straight line through all of them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from milesbatch.report.summary import step_events
from milesbatch.store.layout import RunLayout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("-o", "--output", type=Path, help="PNG to write")
    parser.add_argument("--window", type=int, default=5, help="steps of the running mean")
    arguments = parser.parse_args()
    events = step_events(RunLayout(arguments.run))
    steps = list(events)
    rewards = [event["metrics"]["reward_mean"] for event in events.values()]
    lags = [event["metrics"]["lag_mean"] for event in events.values()]
    few = max(1, min(5, len(steps) // 2))
    slope = statistics.linear_regression(steps, rewards).slope if len(steps) > 1 else 0.0
    print(f"steps {len(steps)}; mean reward of the first {few}: {statistics.fmean(rewards[:few]):.3f}; "
          f"of the last {few}: {statistics.fmean(rewards[-few:]):.3f}; slope {slope:+.5f} per step; "
          f"mean lag {statistics.fmean(lags):.2f} versions")  # fmt: skip
    if arguments.output is not None:
        plot(steps, rewards, arguments.window, arguments.run.name, arguments.output)


def plot(steps: list[int], rewards: list[float], window: int, name: str, output: Path) -> None:
    running = [statistics.fmean(rewards[max(0, i - window + 1) : i + 1]) for i in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(7, 3.5), dpi=110)
    axes.plot(steps, rewards, ".", color="0.6", label="mean reward of a step")
    axes.plot(steps, running, color="C0", label=f"running mean of {window} steps")
    axes.set(xlabel="train step", ylabel="reward", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


if __name__ == "__main__":
    main()
