"""Bad input: one clear error that names the thing, the value and the mend; no traceback; nothing in a run harmed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import QUICK, Command, Ended, digests, fates, milesbatch, wait_until


def check_clear(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert "error: " in ended.err
    assert "what to do: " in ended.err
    for word in words:
        assert word in ended.err, ended.err


def refused(tmp_path: Path, cache: Path, *settings: str, path: Path | None = None) -> Ended:
    flags = [word for setting in settings for word in ("--set", setting)]
    return milesbatch("run", QUICK, "--run-dir", tmp_path / "run", *flags, cache=cache, path=path)


def test_a_missing_recipe(tmp_path: Path, cache: Path) -> None:
    check_clear(milesbatch("run", tmp_path / "no.yaml", cache=cache), 2, "no.yaml")


def test_an_unknown_key_names_the_nearest(tmp_path: Path, cache: Path) -> None:
    check_clear(refused(tmp_path, cache, "trainer.rank=4"), 2, "trainer.rank", "ranks")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps=0", ["steps", "0"]),
        ("trainer.ranks=500", ["trainer.ranks", "500"]),
        ("rollout.groups_per_lease=3", ["groups_per_lease", "3", "8"]),
        ("algorithm.kl_estimator=k9", ["kl_estimator", "k9", "k3"]),
    ],
)
def test_a_value_that_is_not_allowed(tmp_path: Path, cache: Path, setting: str, words: list[str]) -> None:
    check_clear(refused(tmp_path, cache, setting), 2, *words)
    assert not (tmp_path / "run").exists()


def test_a_missing_model_directory(tmp_path: Path, cache: Path) -> None:
    ended = refused(tmp_path, cache, "model.kind=pretrained", "model.path=/no/such/model")
    check_clear(ended, 2, "/no/such/model")


def test_a_prompt_file_with_broken_lines(tmp_path: Path, cache: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", \n{"prompt": "3+3="}\n')
    ended = refused(tmp_path, cache, "data.kind=file", f"data.path={prompts}", "model.warm_start.steps=0")
    check_clear(ended, 2, "prompts.jsonl", "2")


def test_a_prompt_that_does_not_fit_the_model(tmp_path: Path, cache: Path) -> None:
    check_clear(refused(tmp_path, cache, "rollout.sampling.max_new_tokens=4096"), 2, "4096")


def test_a_reward_function_that_does_not_exist(tmp_path: Path, cache: Path) -> None:
    ended = refused(tmp_path, cache, "environment.reward=milesbatch.environments.rewards:nothing")
    check_clear(ended, 2, "nothing", "exact_match")


@pytest.mark.parametrize(
    ("body", "word"),
    [("raise KeyError('colour')", "colour"), pytest.param("return float('nan')", "nan", marks=pytest.mark.long)],
    ids=["raises", "nan"],
)
def test_a_reward_function_that_always_fails_stops_the_run(tmp_path: Path, cache: Path, body: str, word: str) -> None:
    (tmp_path / "bad_reward.py").write_text(f"def score(prompt, response):\n    {body}\n")
    settings = ["environment.reward=bad_reward:score", "environment.failed_window=16"]
    ended = refused(tmp_path, cache, *settings, path=tmp_path)
    check_clear(ended, 1, "100% of the last 16 episodes failed", "bad_reward", word)


def test_a_directory_of_something_else(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    check_clear(refused(tmp_path, cache), 2, "thesis.tex")
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


def test_a_file_where_the_run_should_be(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "run").write_text("a file")
    check_clear(refused(tmp_path, cache), 2, "is a file")


def test_a_run_that_is_not_there(tmp_path: Path, cache: Path) -> None:
    for command in ("status",):
        check_clear(milesbatch(command, tmp_path / "nothing", cache=cache), 2, "nothing")


def mounted(directory: Path, options: str) -> None:
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)


def test_a_read_only_directory(tmp_path: Path, cache: Path) -> None:
    place = tmp_path / "readonly"
    mounted(place, "ro,size=64k")
    try:
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=cache)
        check_clear(ended, 1, str(place / "run"), "ead-only")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_at_the_start(tmp_path: Path, cache: Path) -> None:
    place = tmp_path / "full"
    mounted(place, "size=64k")
    try:
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=cache)
        check_clear(ended, 1, str(place / "run"), "no space")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def small_disk(place: Path) -> Command:
    """A run on a disk that is too small for it; checkpoints and trajectories compete for what there is."""
    mounted(place, "size=2600k")
    settings = ["--set", "slurm.disk_full_wait_s=3"]
    return Command("run", QUICK, "--run-dir", place / "run", *settings, cache=place.parent / "cache")


def grow(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)


@pytest.mark.long
def test_a_disk_that_fills_up_stops_the_run_and_nothing_is_lost(tmp_path: Path, unbroken: Path) -> None:
    """The writers stop with a clear error; when space is there, the same command goes on to the same weights."""
    place = tmp_path / "small"
    try:
        check_clear(small_disk(place).wait(), 1, "no space", str(place))
        grow(place)
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=tmp_path / "cache")
        assert ended.code == 0, ended.err
        assert digests(place / "run") == digests(unbroken)
        assert fates(place / "run") == fates(unbroken)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_is_waited_out_by_the_same_processes(tmp_path: Path, unbroken: Path) -> None:
    place = tmp_path / "small"
    mounted(place, "size=2600k")
    try:
        command = Command("run", QUICK, "--run-dir", place / "run", cache=tmp_path / "cache")
        wait_until(lambda: "waiting_for_space" in told(place / "run"), "a writer says that it waits")
        before = command.children()
        grow(place)
        ended = command.wait()
        assert ended.code == 0, ended.err
        assert " died " not in ended.err, "no process may have been replaced"
        assert len(before) == 4
        assert digests(place / "run") == digests(unbroken)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def told(run: Path) -> str:
    """What the logs say; the event logs share the full disk, so either may have it."""
    return "".join(path.read_text(errors="replace") for path in (run / "events").glob("*.jsonl"))
