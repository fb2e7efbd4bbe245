"""Random operations on a store, against a model that is right by being trivial: a dictionary that never overwrites."""

from __future__ import annotations

from collections.abc import Callable

from conformance import by_digest, in_chunks
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.port import AlreadyExistsError, ArtefactStore, MissingArtefactError

DIRECTORIES = ["", "weights/000001", "weights/000002", "batches", "ü x"]
NAMES = ["manifest.json", "a.bin", "b#1.bin"]
directories = st.sampled_from(DIRECTORIES)
keys = st.builds(lambda d, n: f"{d}/{n}".lstrip("/"), directories, st.sampled_from(NAMES))
contents = st.sampled_from([b"", b"x", b"y", b"longer content " * 40])


def check_against_model(new_place: Callable[[], Callable[[], ArtefactStore]], examples: int, steps: int) -> int:
    """Run the machine on ``examples`` fresh stores; returns how many operations were compared."""
    compared = 0

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.open = new_place()
            self.stores = [self.open(), self.open()]  # two clients of one place
            self.model: dict[str, bytes] = {}
            self.kept: dict[str, bytes] = {}

        def client(self, which: int) -> ArtefactStore:
            nonlocal compared
            compared += 1
            return self.stores[which]

        def commit(self, key: str, data: bytes, call: Callable[[], FileRef]) -> None:
            try:
                ref = call()
            except AlreadyExistsError:
                assert self.model[key] != data
            else:
                assert self.model.setdefault(key, data) == data
                assert ref == FileRef(path=key.rpartition("/")[2], bytes=len(data), digest=digest_bytes(data))

        @rule(which=st.integers(0, 1), key=keys, data=contents)
        def create(self, which: int, key: str, data: bytes) -> None:
            self.commit(key, data, lambda: self.client(which).create_exclusively(key, data))

        @rule(which=st.integers(0, 1), key=keys, data=contents)
        def publish(self, which: int, key: str, data: bytes) -> None:
            directory, _, name = key.rpartition("/")
            self.commit(key, data, lambda: self.client(which).publish(directory, name, in_chunks(data, 7)))

        @rule(which=st.integers(0, 1), directory=directories, data=contents)
        def publish_by_digest(self, which: int, directory: str, data: bytes) -> None:
            key = f"{directory}/{by_digest(digest_bytes(data))}".lstrip("/")
            self.commit(key, data, lambda: self.client(which).publish(directory, by_digest, in_chunks(data, 100)))

        @rule(which=st.integers(0, 1), key=keys)
        def read(self, which: int, key: str) -> None:
            store = self.client(which)
            assert store.read(key) == self.model.get(key)
            assert store.exists(key) == (key in self.model)

        @rule(which=st.integers(0, 1), key=keys, start=st.integers(0, 700), length=st.integers(0, 700))
        def read_range(self, which: int, key: str, start: int, length: int) -> None:
            try:
                found = self.client(which).read_range(key, start, length)
            except MissingArtefactError:
                assert key not in self.model
            else:
                assert found == self.model[key][start : start + length]

        @rule(which=st.integers(0, 1), key=keys, data=contents)
        def verify(self, which: int, key: str, data: bytes) -> None:
            ref = FileRef(path="any", bytes=len(data), digest=digest_bytes(data))
            try:
                self.client(which).verify(key, ref)
            except CorruptArtefactError:
                assert self.model.get(key) != data
            else:
                assert self.model[key] == data

        @rule(which=st.integers(0, 1), key=keys)
        def delete(self, which: int, key: str) -> None:
            self.client(which).delete(key)
            self.model.pop(key, None)

        @rule(which=st.integers(0, 1), prefix=st.sampled_from(["weights", *DIRECTORIES[1:]]))
        def delete_tree(self, which: int, prefix: str) -> None:
            self.client(which).delete_tree(prefix)
            for key in [key for key in self.model if key.startswith(f"{prefix}/")]:
                del self.model[key]

        @rule(which=st.integers(0, 1), key=keys)
        def quarantine(self, which: int, key: str) -> None:
            try:
                kept = self.client(which).quarantine(key, f"reason for {key}")
            except MissingArtefactError:
                assert key not in self.model
                return
            self.kept[kept] = self.model.pop(key)
            self.kept[f"{kept}.reason.txt"] = f"reason for {key}\n".encode()

        @rule(which=st.integers(0, 1), prefix=st.sampled_from(["weights", *DIRECTORIES]))
        def listing(self, which: int, prefix: str) -> None:
            expected = sorted(key for key in self.model if not prefix or key.startswith(f"{prefix}/"))
            assert self.client(which).list_keys(prefix) == expected

        @invariant()
        def nothing_is_lost_in_quarantine(self) -> None:
            for key in list(getattr(self, "kept", {}))[-2:]:
                assert self.stores[0].read(key) == self.kept[key]

        def teardown(self) -> None:
            if hasattr(self, "model"):
                store = self.open()
                assert {key: store.read(key) for key in store.list_keys()} == self.model
                assert {key: store.read(key) for key in store.list_keys("quarantine")} == self.kept

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return compared
