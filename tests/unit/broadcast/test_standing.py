"""Who is asked again, and when."""

from __future__ import annotations

from milesbatch.broadcast.standing import Standing


def versions_without(standing: Standing, process: str, of: range) -> list[int]:
    return [version for version in of if not standing.may_get(process, version)]


def test_one_that_failed_sits_out_for_longer_each_time_and_starts_anew_after_a_success() -> None:
    standing = Standing()
    assert standing.may_get("rollout-0.1", 0)
    standing.failed(["rollout-0.1"], 4)
    assert versions_without(standing, "rollout-0.1", range(5, 20)) == [5]
    standing.failed(["rollout-0.1"], 6)
    assert versions_without(standing, "rollout-0.1", range(7, 20)) == [7, 8]
    standing.succeeded(["rollout-0.1"])
    assert versions_without(standing, "rollout-0.1", range(7, 20)) == []
    standing.failed(["rollout-0.1"], 9)
    assert versions_without(standing, "rollout-0.1", range(10, 20)) == [10]


def test_it_never_sits_out_for_ever() -> None:
    standing, version = Standing(), 0
    for _ in range(12):
        standing.failed(["w.1"], version)
        version = next(v for v in range(version + 1, version + 100) if standing.may_get("w.1", v))
    standing.failed(["w.1"], version)
    assert len(versions_without(standing, "w.1", range(version + 1, version + 200))) == 32


def test_another_start_and_another_worker_are_not_meant() -> None:
    standing = Standing()
    standing.failed(["rollout-0.1"], 4)
    assert standing.may_get("rollout-0.2", 5)
    assert standing.may_get("rollout-1.1", 5)
