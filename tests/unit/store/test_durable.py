"""The one door to the disk: exactly one winner, all or nothing, and errors that name path, cause and mend."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import flip

from milesbatch.errors import (
    CorruptArtefactError,
    FencedError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store import operations
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    digest_file,
    file_ref,
    make_directory,
    move_to_quarantine,
    publish_file,
    publishing,
    read_optional,
    read_verified,
    remove_file,
    remove_tree,
    replace_hint,
    storage_error,
    sweep_temporary,
    sync_tree,
    verify_file,
)
from milesbatch.store.patience import Patience


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# -- exclusive creation ---------------------------------------------------------------------------------------------


def wins(final: Path, data: bytes) -> bool:
    try:
        create_exclusively(final, data)
    except AlreadyExistsError:
        return False
    return True


@pytest.mark.parametrize("attempt", range(5))
def test_one_of_many_threads_wins(tmp_path: Path, attempt: int) -> None:
    final = tmp_path / "a.json"
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda i: wins(final, f"writer {i}".encode() * 100), range(32)))
    assert won.count(True) == 1
    assert contents(tmp_path) == {"a.json": f"writer {won.index(True)}".encode() * 100}


def _race(final: Path, index: int, start: float, results: multiprocessing.SimpleQueue[tuple[int, bool]]) -> None:
    time.sleep(max(0.0, start - time.time()))
    results.put((index, wins(final, f"process {index}".encode())))


def test_one_of_many_processes_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        final = tmp_path / f"{attempt}.json"
        results = context.SimpleQueue()
        arguments = [(final, index, time.time() + 0.05, results) for index in range(8)]
        processes = [context.Process(target=_race, args=each) for each in arguments]
        for process in processes:
            process.start()
        outcome = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
        winners = [index for index, won in outcome.items() if won]
        assert len(winners) == 1
        assert final.read_bytes() == f"process {winners[0]}".encode()


def test_the_same_content_counts_as_won(tmp_path: Path) -> None:
    """A network filesystem may report "exists" for the writer's own link."""
    create_exclusively(tmp_path / "a", b"same")
    create_exclusively(tmp_path / "a", b"same")
    for other in (b"samf", b"sam", b"same ", b""):
        with pytest.raises(AlreadyExistsError, match=r"/a was already committed"):
            create_exclusively(tmp_path / "a", other)
    assert contents(tmp_path) == {"a": b"same"}


def test_a_lost_reply_to_a_successful_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "reply lost, sent again")

    real = os.link
    monkeypatch.setattr(os, "link", link)
    create_exclusively(tmp_path / "a", b"mine")
    assert contents(tmp_path) == {"a": b"mine"}


def test_the_name_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match="/a"):
        create_exclusively(tmp_path / "a", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# -- all or nothing -------------------------------------------------------------------------------------------------


def test_the_fence_is_asked_when_the_data_is_durable_and_not_yet_visible(tmp_path: Path) -> None:
    seen = []

    def check() -> None:
        (temporary,) = tmp_path.iterdir()
        seen.append((temporary.name.startswith(".tmp-"), temporary.read_bytes()))

    ref = publish_file(tmp_path / "a", b"data", check)
    assert seen == [(True, b"data")]
    assert ref == FileRef(path="a", bytes=4, digest=digest_bytes(b"data"))


@pytest.mark.parametrize("error", [FencedError("fenced"), ValueError("x"), KeyboardInterrupt(), OSError(errno.EIO, "")])
def test_a_refusal_before_the_commit_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def refuse() -> None:
        raise error

    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        create_exclusively(tmp_path / "a", b"data", refuse)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), publishing(tmp_path, "a") as file:
        file.stream.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_name_from_the_content(tmp_path: Path) -> None:
    with publishing(tmp_path, lambda digest: digest[7:15]) as file:
        file.stream.write(b"data")
    name = digest_bytes(b"data")[7:15]
    assert file.ref == FileRef(path=name, bytes=4, digest=digest_bytes(b"data"))
    assert contents(tmp_path) == {name: b"data"}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from milesbatch.store import durable, operations

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    stage, directory = sys.argv[1], Path(sys.argv[2])
    if stage in ("fsync", "link", "unlink"):
        setattr(os, stage, die)
    if stage == "sync_directory":
        operations.Operations.sync_directory = die
    with durable.publishing(directory, "a", die if stage == "before_commit" else None) as file:
        file.stream.write(b"x" * 100_000)
        if stage == "write":
            die()
        file.stream.write(b"y" * 100_000)
    if stage == "end":
        die()
"""


def test_a_writer_killed_at_any_stage_leaves_nothing_or_the_whole_file(tmp_path: Path) -> None:
    visible = {"write": 0, "fsync": 0, "before_commit": 0, "link": 0, "unlink": 1, "sync_directory": 1, "end": 1}
    processes = {}
    for stage in visible:
        (tmp_path / stage).mkdir()
        command = [sys.executable, "-c", textwrap.dedent(KILLED), stage, str(tmp_path / stage)]
        processes[stage] = subprocess.Popen(command)
    for stage, process in processes.items():
        assert process.wait() == -signal.SIGKILL, stage
        found = contents(tmp_path / stage)
        temporary = [name for name in found if name.startswith(".tmp-")]
        assert ("a" in found) == bool(visible[stage]), stage
        assert found.get("a", b"x" * 100_000 + b"y" * 100_000) == b"x" * 100_000 + b"y" * 100_000
        assert sweep_temporary(tmp_path / stage) == len(temporary)
        assert not any(name.startswith(".tmp-") for name in contents(tmp_path / stage))
        create_exclusively(tmp_path / stage / "a", b"x" * 100_000 + b"y" * 100_000)  # the next writer is not in the way


def test_sweep_takes_only_temporary_files(tmp_path: Path) -> None:
    for name in (".tmp-1-a", ".tmp-2-b", "a.tmp-", "tmp-x", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    assert sweep_temporary(tmp_path) == 2
    assert sorted(contents(tmp_path)) == [".hidden", "a.tmp-", "tmp-x"]


# -- errors of the filesystem ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EROFS, StorageReadOnlyError),
        (errno.EACCES, StorageReadOnlyError),
        (errno.EPERM, StorageReadOnlyError),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
        (errno.ENOENT, StorageError),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_every_call_names_path_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError], call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(operations if call == "open" else os, call, fail, raising=False)
    with pytest.raises(StorageError) as caught:
        create_exclusively(tmp_path / "a.json", b"x" * 12345)
    assert type(caught.value) is kind
    assert str(tmp_path / "a.json") in caught.value.what
    assert caught.value.mend
    assert ("12,345 bytes" in caught.value.what) == (kind is StorageFullError)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_an_error_without_a_number() -> None:
    assert "cannot use /x: odd" in storage_error(Path("/x"), OSError("odd")).what


def mounted(directory: Path, options: str, script: str) -> str:
    """Run ``script`` in a mount namespace of its own in which ``directory`` is a small memory filesystem."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    shell = f'mount -t tmpfs -o {options} none {directory} && exec {sys.executable} -c "$SCRIPT" {directory}'
    process = subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", shell],
        env={**os.environ, "SCRIPT": textwrap.dedent(script)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    said = mounted(
        tmp_path,
        "size=64k",
        """
        import sys
        from pathlib import Path
        from milesbatch.errors import StorageFullError
        from milesbatch.store.durable import *
        from milesbatch.store.events import EventLog, read_events
        from milesbatch.store.layout import RunLayout
        from milesbatch.store.patience import Patience
        root = Path(sys.argv[1])
        publish_file(root / "small", b"s" * 4096)
        layout = RunLayout(root)
        layout.events.mkdir()
        log = EventLog(layout, "trainer-0", 1)
        log.write("before")
        for action in (publish_file, create_exclusively, replace_hint):
            try:
                action(root / "big", b"b" * 1_000_000)
            except StorageFullError as error:
                print(error.what)
        print(sorted(path.name for path in root.iterdir()))
        fill = open(root / "fill", "wb", buffering=0)
        try:
            while True:
                fill.write(b"f" * 4096)
        except OSError:
            fill.close()
        for i in range(2000):
            log.write("lost", i=i)
        log.close()
        log = EventLog(layout, "rollout-0", 1)
        log.write("lost too")
        log.close()
        waits = []
        def again():
            remove_file(root / "fill")
            return publish_file(root / "later", b"x" * 8192)
        def full():
            publish_file(root / "more", b"x" * 8192)
        actions = iter([full, again])
        print(Patience(10.0, waits.append).until_space(lambda: next(actions)()).bytes, len(waits))
        log = EventLog(layout, "trainer-0", 1)
        log.write("after")
        log.close()
        events = [event["event"] for event, _ in read_events(layout.event_log("trainer-0", 1))]
        print(events[0], events[-1])
        """,
    ).splitlines()
    assert len(said) == 6, said
    assert all(f"{tmp_path}/big" in line for line in said[:3])
    assert all("1,000,000 bytes" in line for line in said[:2])
    assert said[3:] == ["['events', 'small']", "8192 1", "before after"]


def test_a_disk_that_is_really_read_only(tmp_path: Path) -> None:
    said = mounted(
        tmp_path,
        "size=64k,ro",
        """
        import sys
        from pathlib import Path
        from milesbatch.errors import StorageReadOnlyError
        from milesbatch.store.durable import *
        root = Path(sys.argv[1])
        for action in (lambda p: publish_file(p, b""), make_directory, lambda p: replace_hint(p, b"")):
            try:
                action(root / "a")
            except StorageReadOnlyError as error:
                print(error.what)
        """,
    )
    assert said.splitlines() == [f"cannot write {tmp_path}/a: Read-only file system"] * 3


def test_waiting_for_space_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    told: list[str] = []

    def full() -> FileRef:
        raise StorageFullError("no space for /x")

    with pytest.raises(StorageFullError):
        Patience(100.0, told.append).until_space(full)
    assert now[0] == 100.0
    assert 3 < len(told) < 30
    assert told[0].startswith("no space for /x")

    def other() -> FileRef:
        raise StorageReadOnlyError("/x")

    with pytest.raises(StorageReadOnlyError):
        Patience(100.0, told.append).until_space(other)


# -- reading --------------------------------------------------------------------------------------------------------


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789" * 1000)
    ref = file_ref(path, "other/name")
    assert ref == FileRef(path="other/name", bytes=10_000, digest=digest_bytes(path.read_bytes()))
    verify_file(path, ref)
    assert read_verified(path, ref.digest) == path.read_bytes()

    def check(damage: Callable[[], object], says: str) -> None:
        path.write_bytes(b"0123456789" * 1000)
        damage()
        with pytest.raises(CorruptArtefactError, match=says) as caught:
            verify_file(path, ref)
        assert str(path) in caught.value.what
        with pytest.raises(CorruptArtefactError):
            read_verified(path, ref.digest)

    check(lambda: flip(path, 0), "is damaged")
    check(lambda: flip(path, -1, 0x01), "is damaged")
    check(lambda: os.truncate(path, 9_999), "9999 bytes, expected 10000")
    check(lambda: os.truncate(path, 10_001), "10001 bytes")
    check(lambda: path.unlink(), "is missing")


def test_digests_of_files_and_bytes_agree(tmp_path: Path) -> None:
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        (tmp_path / "a").write_bytes(b"z" * size)
        assert digest_file(tmp_path / "a") == digest_bytes(b"z" * size)


def test_absent_and_unreadable_are_kept_apart(tmp_path: Path) -> None:
    assert read_optional(tmp_path / "a") is None
    assert read_optional(tmp_path / "no" / "directory") is None
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop"):
        with pytest.raises(StorageError, match=str(path)):
            read_optional(path)
        with pytest.raises(StorageError):
            file_ref(path)


# -- removing and moving --------------------------------------------------------------------------------------------


def test_quarantine_keeps_everything_with_its_reason(tmp_path: Path) -> None:
    make_directory(tmp_path / "run" / "weights" / "000001")
    for _ in range(2):
        path = tmp_path / "run" / "weights" / "000001" / "manifest.json"
        path.write_bytes(b"{}")
        target = move_to_quarantine(path, tmp_path / "quarantine", "it is broken")
        assert not path.exists()
        assert target.read_bytes() == b"{}"
        assert target.name.startswith("000001.manifest.json.")
        assert target.with_name(target.name + ".reason.txt").read_text() == "it is broken\n"
    assert len(contents(tmp_path / "quarantine")) == 4
    with pytest.raises(StorageError, match=r"manifest\.json"):
        move_to_quarantine(path, tmp_path / "quarantine", "it is gone")


def test_trees(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a")
    (tmp_path / "a" / "b" / "x").write_bytes(b"x")
    sync_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    remove_tree(tmp_path / "a")
    remove_file(tmp_path / "a")
    with pytest.raises(StorageError):
        sync_tree(tmp_path / "a")


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    others = {"manifest.json": b"theirs", "thesis.txt": b"years of work"}
    (tmp_path / "elsewhere").mkdir()
    for name, data in others.items():
        (tmp_path / "elsewhere" / name).write_bytes(data)
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "inside").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "b" / "manifest.json").symlink_to(tmp_path / "elsewhere" / "thesis.txt")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere", target_is_directory=True)
    for name in ("a", "b", "dangling"):
        remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert contents(tmp_path / "elsewhere") == others


def test_the_manifest_goes_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.json").write_bytes(b"")
    (tmp_path / "a" / "shard").write_bytes(b"")
    gone: list[str] = []

    class Noting(operations.Operations):
        def unlink(self, path: Path) -> None:
            gone.append(path.name)
            super().unlink(path)

    with operations.installed(Noting()):
        remove_tree(tmp_path / "a")
    assert gone == ["manifest.json", "shard"]
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(StorageError):
            make_directory(path)


def test_hints_are_replaced_whole(tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        replace_hint(tmp_path / "hint", data)
        assert contents(tmp_path) == {"hint": data}
    with pytest.raises(StorageError):
        replace_hint(tmp_path / "no" / "hint", b"")
