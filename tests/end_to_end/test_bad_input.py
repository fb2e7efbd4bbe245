"""Bad input: one clear error that names the thing, the value and the mend; no traceback; nothing in a run harmed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import QUICK, Ended, milesbatch


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
    ("body", "word"), [("raise KeyError('colour')", "colour"), ("return float('nan')", "nan")], ids=["raises", "nan"]
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
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_at_the_start(tmp_path: Path, cache: Path) -> None:
    place = tmp_path / "full"
    mounted(place, "size=64k")
    try:
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=cache)
        check_clear(ended, 1, str(place / "run"), "no space")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_while_training_loses_nothing(tmp_path: Path, cache: Path, unbroken: Path) -> None:
    """The writers stop with a clear error; when space is there, the same command goes on to the same weights."""
    from command import digests, fates

    place = tmp_path / "small"
    mounted(place, "size=2600k")
    try:
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=cache)
        check_clear(ended, 1, "no space", str(place))
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        ended = milesbatch("run", QUICK, "--run-dir", place / "run", cache=cache)
        assert ended.code == 0, ended.err
        assert digests(place / "run") == digests(unbroken)
        assert fates(place / "run") == fates(unbroken)
    finally:
        subprocess.run(["umount", str(place)], check=True)
