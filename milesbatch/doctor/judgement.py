"""What two nodes measured, and what that means for runs. Pure.

Invariant: a test whose result is missing is reported as not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn
from milesbatch.recipe.slurm import Slurm

_AREA = "nodes"
_VISIBLE_WAIT_S = float(Slurm().visible_wait_s)
_SIGN_OF_LIFE_S = 10 * float(Slurm().heartbeat_s)
"""For so long a controller's sign of life may stand still before workers of other jobs leave it."""
_SOON_S = 1.0
_SKEW_S = 1.0
_SLOW_BYTES_PER_S = 100e6
_OTHER_FILESYSTEM = "choose a directory on another filesystem"
Measured = Mapping[str, Any]


def judge_pair(examiner: Measured, servant: Measured, own_version: str) -> list[Check]:
    """Verdicts on the results of both nodes; ``own_version`` is milesbatch's on the host that asks."""
    for part, result in (("first", examiner), ("second", servant)):
        if "error" in result:
            return [_cannot_talk(part, str(result["error"]))]
    tests: tuple[tuple[str, str, Callable[[Measured], Check]], ...] = (
        ("clock", "clocks", _clock),
        ("race", "exclusive creation from two nodes", _race),
        ("new_file", "a new file seen from the other node", _new_file),
        ("rename", "a rename seen from the other node", _rename),
        ("hint", "a replaced file seen from the other node", _hint),
        ("listing", "a listing on the other node", _listing),
        ("throughput", "throughput from node to node", _throughput),
        ("collective", "a sum over both nodes", _collective),
    )
    checks = [_where(examiner), _address(examiner, servant)]
    for key, name, verdict in tests:
        measured = examiner.get(key)
        if measured is None:
            checks.append(unchecked(_AREA, name, "no time was left"))
        elif "error" in measured:
            checks.append(bad(_AREA, name, str(measured["error"]), "runs need this", _OTHER_FILESYSTEM))
        else:
            checks.append(verdict(measured))
    return [*checks, *_packages(examiner.get("facts", {}), own_version)]


def same_node(examiner: Measured, servant: Measured) -> bool:
    """Slurm put both parts on one node: nothing was learnt about two."""
    return bool(examiner.get("node")) and examiner.get("node") == servant.get("node")


def _cannot_talk(part: str, error: str) -> Check:
    meaning = "nodes must see each other's files in the run directory, and reach the controller over TCP"
    mend = "is the directory on a filesystem that all nodes mount? is there a firewall between compute nodes?"
    return bad(_AREA, "two nodes", f"the {part} node says: {error}", meaning, mend)


def _where(examiner: Measured) -> Check:
    facts = examiner["facts"]
    parts = [f"{facts[part]['node']} ({facts[part]['memory']})" for part in ("examiner", "servant")]
    return ok(_AREA, "two nodes", " and ".join(parts))


def _address(examiner: Measured, servant: Measured) -> Check:
    used, wanted = servant["address"], examiner["addresses"][0]
    if used != wanted:
        meaning = "runs give workers that address of the controller: they would not reach it"
        found = f"{used} works, {wanted} (Slurm's NodeAddr) does not"
        return bad(_AREA, "reaching a node", found, meaning, "ask the site's support which names compute nodes know")
    return ok(_AREA, "reaching a node", f"over TCP at {used}")


def _clock(measured: Measured) -> Check:
    skew_s, trip_s = float(measured["skew_s"]), float(measured["round_trip_s"])
    found = f"{abs(skew_s) * 1e3:.1f} ms apart; a message there and back takes {trip_s * 1e3:.2f} ms"
    if abs(skew_s) > _SKEW_S:
        meaning = "logs are merged in the wrong order; runs themselves use no clocks of two hosts"
        return warn(_AREA, "clocks", found, meaning, "synchronize clocks (chrony, ntpd)")
    return ok(_AREA, "clocks", found)


def _race(measured: Measured) -> Check:
    name, races, wrong = "exclusive creation from two nodes", measured["races"], measured["wrong"]
    if wrong:
        first = wrong[0]
        found = f"in {len(wrong)} of {races} races not exactly one won, or both did not see the same (first: {first})"
        meaning = "two controllers may both believe that they hold a run: nothing that it promises holds"
        return bad(_AREA, name, found, meaning, _OTHER_FILESYSTEM)
    return ok(_AREA, name, f"{races} races, one winner each ({measured['won_here']} here)")


def _new_file(measured: Measured) -> Check:
    return _seen("a new file seen from the other node", measured["seconds"])


def _rename(measured: Measured) -> Check:
    name = "a rename seen from the other node"
    if measured["there_s"] is not None and measured["gone_s"] is None:
        meaning = "files that were moved out of the way go on to be seen at their old place"
        return warn(_AREA, name, "the new name is seen, and the old one stays", meaning, _OTHER_FILESYSTEM)
    return _seen(name, [measured["there_s"]])


def _seen(name: str, seconds: list[float | None]) -> Check:
    late = [second for second in seconds if second is None]
    if late:
        meaning = f"sound files are taken for lost, unless slurm.visible_wait_s ({_VISIBLE_WAIT_S:.0f}) is longer"
        return bad(_AREA, name, "not within the time there was", meaning, _OTHER_FILESYSTEM)
    worst = max(second for second in seconds if second is not None)
    found = f"after {worst:.3f} s at worst, of {len(seconds)}"
    if worst > 0.7 * _VISIBLE_WAIT_S:
        meaning = f"close to slurm.visible_wait_s ({_VISIBLE_WAIT_S:.0f} s), after which a file counts as lost"
        return bad(_AREA, name, found, meaning, f"set slurm.visible_wait_s: {3 * worst:.0f}")
    if worst > _SOON_S:
        meaning = "every step waits about that long for files from other nodes; nothing is lost"
        return warn(
            _AREA,
            name,
            found,
            meaning,
            "a filesystem with fresher caches (NFS: actimeo, lookupcache=positive) is faster",
        )
    return ok(_AREA, name, found)


def _hint(measured: Measured) -> Check:
    name, seconds = "a replaced file seen from the other node", measured["seconds"]
    worst = None if None in seconds else max(seconds)
    found = "not within the time there was" if worst is None else f"after {worst:.3f} s at worst, of {len(seconds)}"
    if worst is None or worst > 0.7 * _SIGN_OF_LIFE_S:
        meaning = f"workers of jobs of their own take a controller for dead after {_SIGN_OF_LIFE_S:.0f} s: they would leave it"
        return bad(
            _AREA, name, found, meaning, "raise slurm.heartbeat_s, and do not use `scale` or slurm.shape: separate here"
        )
    if worst > _SOON_S:
        return warn(_AREA, name, found, "a dead controller is noticed that much later", "nothing; or shorter caches")
    return ok(_AREA, name, found)


def _listing(measured: Measured) -> Check:
    name, seconds = "a listing on the other node", measured["seconds"]
    if seconds is None or seconds > _SOON_S:
        found = "stale for longer than was waited" if seconds is None else f"stale for {seconds:.1f} s"
        return ok(_AREA, name, f"{found}; runs do not rely on it (`logs -f` shows new files that late)")
    return ok(_AREA, name, f"fresh after {seconds:.3f} s")


def _throughput(measured: Measured) -> Check:
    name = "throughput from node to node"
    if measured["read_s"] is None:
        return bad(
            _AREA,
            name,
            "a file of 64 MiB was not whole in time",
            "weights would arrive late or never",
            _OTHER_FILESYSTEM,
        )
    writes, reads = (measured["bytes"] / max(measured[key], 1e-6) for key in ("written_s", "read_s"))
    found = f"writes {writes / 1e6:.0f} MB/s durably; the other node reads it at {reads / 1e6:.0f} MB/s"
    if min(writes, reads) < _SLOW_BYTES_PER_S:
        meaning = f"weights of 1 GB take {1e9 / writes + 1e9 / reads:.0f} s from trainer to worker"
        return warn(_AREA, name, found, meaning, "weights.dtype: bfloat16 makes them small; or a faster filesystem")
    return ok(_AREA, name, found)


def _collective(measured: Measured) -> Check:
    name = "a sum over both nodes"
    if "skipped" in measured:
        return unchecked(_AREA, name, str(measured["skipped"]))
    errors = [str(measured[end]["error"]) for end in ("here", "there") if measured[end].get("error")]
    if errors:
        meaning = "a trainer on more than one node cannot start; on one node it may"
        variable = "NCCL_SOCKET_IFNAME" if measured["kind"] == "nccl" else "GLOO_SOCKET_IFNAME"
        mend = f"set {variable} to the network between compute nodes, under `environment` in the site file"
        return bad(_AREA, name, f"{measured['kind']}: {'; '.join(dict.fromkeys(errors))}", meaning, mend)
    return ok(_AREA, name, f"{measured['kind']}: {measured['here']['bytes_per_s'] / 1e6:.0f} MB/s of 16 MiB")


def _packages(facts: Mapping[str, Any], own_version: str) -> list[Check]:
    if not facts:
        return []
    parts = [facts["examiner"], facts["servant"]]
    names = [part["node"] for part in parts]
    versions = [part["versions"] for part in parts]
    checks = [_same_versions(names, versions, own_version)]
    for part in parts:
        gpus = part["gpus"]
        name = f"torch on {part['node']}"
        if gpus.get("torch") is None:
            meaning = "trainer and workers cannot run there"
            mend = "`python` of the site file (or the container's) must have milesbatch[train]"
            checks.append(bad(_AREA, name, str(gpus.get("error")), meaning, mend))
            continue
        broken = [device["error"] for device in gpus["devices"] if device["error"]]
        devices = ", ".join(device["name"] for device in gpus["devices"]) or "no GPU was asked for, or none is seen"
        if broken:
            checks.append(
                bad(
                    _AREA, name, f"{devices}: {broken[0]}", "it cannot compute", "report the node to the site's support"
                )
            )
        else:
            checks.append(ok(_AREA, name, f"{gpus['torch']}; {devices}"))
    return checks


def _same_versions(names: list[str], versions: list[Mapping[str, str]], own_version: str) -> Check:
    name = "packages on the nodes"
    differing = sorted(key for key in {*versions[0], *versions[1]} if versions[0].get(key) != versions[1].get(key))
    if differing:
        found = "; ".join(
            f"{key}: {versions[0].get(key)} on {names[0]}, {versions[1].get(key)} on {names[1]}" for key in differing
        )
        meaning = "trainer and workers compute with different code: replays may differ, and files may not be understood"
        return bad(_AREA, name, found, meaning, "use one environment or image for both roles")
    there = versions[0].get("milesbatch", "not installed")
    if there != own_version:
        meaning = "what is submitted here may not be understood there"
        mend = "install the same version in the environment or image of the site file"
        return bad(_AREA, name, f"milesbatch is {there} there, {own_version} here", meaning, mend)
    return ok(
        _AREA,
        name,
        f"the same on both: milesbatch {there}, Python {versions[0].get('python')}, {len(versions[0])} in all",
    )
