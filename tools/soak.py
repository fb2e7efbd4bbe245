"""Soak: a long run with random faults, compared with an unbroken one: ``python tools/soak.py --minutes 20 [--seed N]``.

Every few seconds something is killed, stopped or asked to stop: a worker, a trainer rank, the controller, or everything at
once; whenever the command has ended it is given again. At the end the digests of all versions, the fates of all groups and the
audit must be those of a run that nothing happened to. Prints its seed, so that a failure can be repeated.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

RECIPE = Path(__file__).parents[1] / "tests" / "end_to_end" / "quick.yaml"
FAULTS = ("worker", "worker", "rank", "rank", "hang", "controller", "everything", "preempt")


def start(run: Path, steps: int) -> subprocess.Popen[bytes]:
    settings = ["--set", f"steps={steps}", "--set", "checkpoint.every=10", "--set", "slurm.heartbeat_s=1"]
    settings += ["--set", "slurm.max_restarts_without_progress=50"]
    log = open(run.parent / f"{run.name}.log", "ab")  # noqa: SIM115 - belongs to the process
    command = [sys.executable, "-m", "milesbatch.cli.main", "run", str(RECIPE), "--run-dir", str(run), *settings]
    return subprocess.Popen(command, stdout=log, stderr=log)


def strike(process: subprocess.Popen[bytes], fault: str, choose: random.Random) -> bool:
    """Do one fault; False when there was nothing to hit."""
    try:
        children = psutil.Process(process.pid).children()
        roles = {child: " ".join(child.cmdline()) for child in children}
    except psutil.Error:
        return False
    wanted = {"worker": "milesbatch.rollout", "hang": "milesbatch.rollout", "rank": "milesbatch.trainer"}.get(fault)
    victims = [child for child, words in roles.items() if wanted is not None and wanted in words]
    if wanted is not None and not victims:
        return False
    if fault in ("worker", "rank"):
        choose.choice(victims).kill()
    elif fault == "hang":
        choose.choice(victims).suspend()
    elif fault == "preempt":
        process.send_signal(signal.SIGTERM)
    else:
        process.kill()
        for child in children if fault == "everything" else ():
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
    return True


def torment(run: Path, steps: int, choose: random.Random, until_s: float) -> collections.Counter[str]:
    """Run to the end; faults come until the time is over."""
    struck: collections.Counter[str] = collections.Counter()
    while True:
        process = start(run, steps)
        while process.poll() is None:
            if time.monotonic() > until_s:
                process.wait()
                break
            time.sleep(choose.uniform(2.0, 12.0))
            fault = choose.choice(FAULTS)
            if process.poll() is None and strike(process, fault, choose):
                struck[fault] += 1
        if process.returncode == 0:
            return struck
        if process.returncode not in (75, -signal.SIGKILL, -signal.SIGTERM):
            raise SystemExit(f"the run ended with {process.returncode}; see {run.parent / (run.name + '.log')}")


def outcome(run: Path) -> tuple[list[str], dict[int, str]]:
    """Weights digests of all versions, and what became of each group."""
    digests = [json.loads(p.read_text())["weights_digest"] for p in sorted((run / "weights").glob("*/manifest.json"))]
    fates: dict[int, str] = {}
    for path in sorted((run / "batches").glob("[0-9]*.json")):
        record = json.loads(path.read_text())
        for group in (*record["trained"], *record["rejected"]):
            if group["group_id"] in fates:
                raise SystemExit(f"group {group['group_id']} has two fates")
            fates[group["group_id"]] = f"{record['step']} {group.get('reason', 'trained')}"
    return digests, fates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="for how long faults come")
    parser.add_argument("--steps", type=int, default=600, help="steps of the run; it must last longer than the faults")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the faults")
    parser.add_argument("--keep", type=Path, help="directory for the two runs; default: a temporary one")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    place = arguments.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    place.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * arguments.minutes
    struck = torment(place / "broken", arguments.steps, random.Random(arguments.seed), until_s)
    if start(place / "unbroken", arguments.steps).wait():
        raise SystemExit(f"the unbroken run failed; see {place / 'unbroken.log'}")
    is_equal = outcome(place / "broken") == outcome(place / "unbroken")
    audit = subprocess.run(
        [sys.executable, "-m", "milesbatch.cli.main", "audit", str(place / "broken"), "--json"], capture_output=True
    )
    incarnations = len(list((place / "broken" / "incarnations").glob("*.json")))
    print(f"faults: {dict(struck)}; {incarnations} incarnations; {arguments.steps} steps")
    print(f"same digests and fates as unbroken: {is_equal}; audit exit status {audit.returncode}; runs in {place}")
    return 0 if is_equal and audit.returncode == 0 and sum(struck.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
