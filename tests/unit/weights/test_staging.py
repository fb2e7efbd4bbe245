"""A staged model: only proven versions are served, whatever a killed process left; and what was torn is mended."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from staged_copy import Make, assert_holds
from typer.testing import CliRunner

from milesbatch.cli import following, weights_stage
from milesbatch.cli.weights import app
from milesbatch.errors import InputError, StorageError, StorageFullError
from milesbatch.store.layout import RunLayout
from milesbatch.weights import materialize as materialize_module
from milesbatch.weights import staging as module
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.staging import Staging


@pytest.fixture(autouse=True)
def model(layout: RunLayout) -> None:
    (layout.model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def test_goes_forward_by_patches_and_back_by_a_full_copy(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path
) -> None:
    with Staging(tmp_path / "stage", layout) as staging:
        assert staging.current is None
        staging.advance_to(1)
        assert_holds(staging, 1, version_tensors)
        inode = (staging.model / "model.safetensors").stat().st_ino
        for version in (2, 5, 6):
            staging.advance_to(version)
            assert_holds(staging, version, version_tensors)
            assert (staging.model / "model.safetensors").stat().st_ino == inode, "patched in place"
        staging.advance_to(3)
        assert_holds(staging, 3, version_tensors)
    with Staging(tmp_path / "stage", layout) as again:
        assert_holds(again, 3, version_tensors)


def test_damaged_payload_is_found_before_the_model_is_touched(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, damage: Callable[[int, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with Staging(tmp_path / "stage", layout) as staging:
        staging.advance_to(1)
        damage(2, "delta")
        monkeypatch.setattr(module, "_scatter", lambda *_: pytest.fail("the model was touched"))
        with pytest.raises(Exception, match="policy version 2 cannot be rebuilt"):
            staging.advance_to(2)
        assert_holds(staging, 1, version_tensors)
        staging.advance_to(4)  # by the keyframe of version 3
        assert_holds(staging, 4, version_tensors)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, float], None]]:
    """``writes(n, share)``: the n-th write of any kind is cut short after a share of its bytes, and the process is over."""
    real = {name: getattr(module, name) for name in ("_scatter", "_write_redo", "replace_hint")}
    count, last, share = 0, 0, 0.0

    def begin(number: int, part: float) -> None:
        nonlocal count, last, share
        count, last, share = 0, number, part

    def due() -> bool:
        nonlocal count
        count += 1
        return count == last

    def scatter(elements: np.ndarray, redo: module._Redo) -> None:
        if not due():
            return real["_scatter"](elements, redo)
        some = int(len(redo.places) * share)
        real["_scatter"](elements, module._Redo(redo.name, redo.places[:some], redo.values[:some]))
        raise Killed

    def write_redo(path: Path, redo: module._Redo) -> None:
        is_due = due()
        real["_write_redo"](path, redo)
        if is_due:
            os.truncate(path, int(path.stat().st_size * share))
            raise Killed

    def replace(path: Path, data: bytes) -> None:
        if not due():
            return real["replace_hint"](path, data)
        if share == 1.0:
            real["replace_hint"](path, data)
        raise Killed

    for name, stand_in in (("_scatter", scatter), ("_write_redo", write_redo), ("replace_hint", replace)):
        monkeypatch.setattr(module, name, stand_in)
    yield begin


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_killed_at_any_write_it_serves_a_published_version_or_none_and_goes_on(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, share: float,
    writes: Callable[[int, float], None],
) -> None:  # fmt: skip
    """Also when what opens the directory again is killed at any of its writes."""
    ends = set()
    for number in range(1, 40):
        directory = tmp_path / f"stage-{number}"
        writes(0, 0.0)
        with Staging(directory, layout) as staging:
            staging.advance_to(1)
        writes(number, share)
        staging = Staging(directory, layout)
        try:
            staging.advance_to(2)
        except Killed:
            finished = False
        else:
            finished = True
        staging.close()
        for second in (1, 2, 3, 0):
            writes(second, share)
            reopened = None
            with suppress(Killed):
                reopened = Staging(directory, layout)
            if reopened is None:
                continue
            ends.add(reopened.current)
            if reopened.current is not None:
                assert_holds(reopened, reopened.current, version_tensors)
            reopened.close()
        writes(0, 0.0)
        with Staging(directory, layout) as staging:
            assert staging.current in (1, 2), "a process that is killed costs no full copy"
            staging.advance_to(2)
            assert_holds(staging, 2, version_tensors)
        if finished:
            break
    assert finished and number > 8
    assert ends == {1, 2}


def _dying_at(touched: int) -> Callable[[np.ndarray, module._Redo], None]:
    real, left = module._scatter, touched

    def die(elements: np.ndarray, redo: module._Redo) -> None:
        nonlocal left
        if left == 0:
            half = len(redo.places) // 2
            real(elements, module._Redo(redo.name, redo.places[:half], redo.values[:half]))
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        real(elements, redo)

    return die


def test_a_real_kill_in_the_middle(layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path) -> None:
    for touched in range(4):
        directory = tmp_path / f"stage-{touched}"
        with Staging(directory, layout) as staging:
            staging.advance_to(1)
        child = os.fork()
        if child == 0:  # pragma: no cover
            module._scatter = _dying_at(touched)
            Staging(directory, layout).advance_to(2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        with Staging(directory, layout) as staging:
            assert_holds(staging, 2, version_tensors)


def test_bytes_that_nobody_published_are_never_served(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path
) -> None:
    path = tmp_path / "stage" / "model" / "model.safetensors"
    with Staging(tmp_path / "stage", layout) as staging:
        staging.advance_to(1)
    whole = path.read_bytes()
    for offset in (0, 9, 200, len(whole) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[offset] ^= 1
        path.write_bytes(data)
        with Staging(tmp_path / "stage", layout) as staging:
            if staging.current is not None:  # a bit of the header that means nothing
                assert_holds(staging, 1, version_tensors)
            staging.advance_to(2)
            assert_holds(staging, 2, version_tensors)
            staging.advance_to(1)
    others = ({"version": 9, "target": None}, {"version": 2, "target": None}, {"version": 0, "target": 2}, {}, [], None)
    for state in (b"", b"{", *(json.dumps(other).encode() for other in others)):
        (tmp_path / "stage" / "state.json").write_bytes(state)
        with Staging(tmp_path / "stage", layout) as staging:
            assert staging.current is None
            staging.advance_to(1)
            assert_holds(staging, 1, version_tensors)


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["model/thesis.txt", "fresh/a", "state.json", "redo.bin", "staging.json", "weight_v000001/x"]
)
def test_a_directory_that_others_filled_is_refused_and_stays(
    layout: RunLayout, chain: Publisher, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    with pytest.raises(
        InputError, match=r"not made by `milesbatch weights stage`: it holds|staging.json was not written by"
    ):
        Staging(tmp_path / "mine", layout)
    assert everything(tmp_path / "mine") == {name: b"years of work"}


def test_links_are_replaced_and_never_followed(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path
) -> None:
    (layout.model / "templates").mkdir()
    (layout.model / "templates" / "tool.jinja").write_text("{{ messages }}")
    directory, elsewhere = tmp_path / "stage", tmp_path / "elsewhere"
    with Staging(directory, layout) as staging:
        staging.advance_to(1)
    for name in ("model", "model/model.safetensors", "model/config.json", "model/templates", "redo.bin", "fresh"):
        path = directory / name
        if path.exists():
            path.rename(elsewhere)
        else:
            elsewhere.mkdir()
            (elsewhere / "kept").write_text("kept")
        if name == "model":
            (elsewhere / "config.json").write_text("another one's")
        before = everything(tmp_path) if elsewhere.is_dir() else elsewhere.read_bytes()
        path.symlink_to(elsewhere)
        with Staging(directory, layout) as staging:
            staging.advance_to(2)
            assert_holds(staging, 2, version_tensors)
            assert not path.is_symlink(), name
            staging.advance_to(1)
        if elsewhere.is_dir():
            assert {k: v for k, v in before.items() if k.startswith("elsewhere/")} == {
                f"elsewhere/{k}": v for k, v in everything(elsewhere).items()
            }
            elsewhere.rename(tmp_path / f"was-{name.replace('/', '-')}")
        else:
            assert elsewhere.read_bytes() == before
            elsewhere.unlink()


def test_files_beside_the_tensors_are_proven_and_mended(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path
) -> None:
    (layout.model / "tokenizer").mkdir()
    (layout.model / "tokenizer" / "vocab.json").write_text('{"a": 1}')
    directory = tmp_path / "stage"
    with Staging(directory, layout) as staging:
        staging.advance_to(1)
        whole = everything(staging.model)
    inode = (directory / "model" / "model.safetensors").stat().st_ino
    for name in ("config.json", "tokenizer/vocab.json"):
        for damage in (b"", b"garbage", None):
            path = directory / "model" / name
            path.unlink() if damage is None else path.write_bytes(damage)
            with Staging(directory, layout) as staging:
                assert staging.current == 1 and staging.mended == (name,)
                assert everything(staging.model) == whole
    shutil.rmtree(directory / "model" / "tokenizer")
    (directory / "model" / "config.json").unlink()
    with Staging(directory, layout) as staging:
        assert staging.current == 1 and everything(staging.model) == whole
        assert (directory / "model" / "model.safetensors").stat().st_ino == inode, "no full copy for a small file"
    (directory / "model" / "config.json").unlink()
    (directory / "model" / "config.json").mkdir()
    with Staging(directory, layout) as staging:
        assert staging.current is None
        staging.advance_to(1)
        assert everything(staging.model) == whole


def test_a_full_copy_that_found_no_room_leaves_nothing(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "stage"
    with Staging(directory, layout) as staging:
        staging.advance_to(4)
        whole = everything(directory)

        def full(stream: object, tensors: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(materialize_module, "write_tensors", full)
            with pytest.raises(StorageFullError, match=r"no space or quota left for .*model\.safetensors"):
                staging.advance_to(3)
        assert_holds(staging, 4, version_tensors)
        assert everything(directory) == whole
    (directory / "fresh").mkdir()
    (directory / "fresh" / "model.safetensors").write_bytes(b"of one that was killed")
    with Staging(directory, layout) as staging:
        assert everything(directory) == whole
        assert_holds(staging, 4, version_tensors)


def test_what_cannot_be_staged_leaves_no_directory(layout: RunLayout, chain: Publisher, tmp_path: Path) -> None:
    for _ in range(2):
        with (
            Staging(tmp_path / "a" / "b", layout) as staging,
            pytest.raises(StorageError, match="version 9 is not published"),
        ):
            staging.advance_to(9)
        assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    Staging(tmp_path / "mine", layout).close()
    assert list((tmp_path / "mine").iterdir()) == []


def test_one_process_at_a_time(layout: RunLayout, chain: Publisher, tmp_path: Path) -> None:
    with Staging(tmp_path / "stage", layout), pytest.raises(InputError, match="used by another process"):
        Staging(tmp_path / "stage", layout)
    Staging(tmp_path / "stage", layout).close()


def test_the_command_stages_one_version_or_the_newest(
    layout: RunLayout, chain: Publisher, version_tensors: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_stage, "find_run", lambda text: layout)
    monkeypatch.setattr(weights_stage, "read_incarnations", lambda layout: ())
    monkeypatch.setattr(weights_stage.Seals, "accept_weights", lambda self, manifest: True)
    directory = tmp_path / "stage"

    def invoke(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["stage", "run", "-o", str(directory), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    assert f"{directory}/model is policy version 2 (xxh128:" in invoke("--version", "2")[1]
    assert "already" in invoke("--version", "2")[1]
    code, text = invoke("--json")
    assert code == 0 and json.loads(text)["version"] == 6 and len(json.loads(text)["staged"]) == 1
    with Staging(directory, layout) as staging:
        assert_holds(staging, 6, version_tensors)
    with pytest.raises(InputError, match="give one of the two"):
        invoke("--version", "2", "--follow")
    with pytest.raises(InputError, match="has no policy version 9: it has versions 0 to 6"):
        invoke("--version", "9")
    ended = SimpleNamespace(is_over=True, state="failed", cause="no space left", exit_code=1)
    monkeypatch.setattr(following.StatusReader, "condition", lambda reader: ended)
    assert invoke("--follow")[0] == 1


def test_what_was_never_published_makes_no_directory(whole: RunLayout, tmp_path: Path) -> None:
    for words in (
        ["stage", str(whole.root), "-o", str(tmp_path / "a" / "b")],
        ["register", str(whole.root), "--name", "m"],
    ):
        result = CliRunner().invoke(app, [*words, "--version", "9"])
        assert isinstance(result.exception, InputError) and "has no policy version 9" in result.exception.what
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for command in (["verify"], ["stage", "-o", str(tmp_path / "a")]):
        result = CliRunner().invoke(app, [command[0], str(tmp_path / "file"), *command[1:]])
        assert isinstance(result.exception, InputError) and "is not a run: it is a file" in result.exception.what
