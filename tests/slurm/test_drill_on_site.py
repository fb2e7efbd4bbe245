"""A drill whose runs are Slurm jobs: faults inside the steps, acts by Slurm's own commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import QUICK
from slurm_run import SlurmRun

PLAN = """\
runs:
  - name: everything
    faults:
      - {name: rank-trained, role: trainer-1, point: trainer.trained, nth: 2, action: kill}
    acts:
      - {name: second-controller, act: second_controller, nth: 4, hold_s: 6}
      - {name: everything-killed, act: power_cut, nth: 2}
      - {name: preempted, act: preempt, nth: 2, hold_s: 1}
      - {name: left-out, act: zombie, role: trainer-0, point: "link:batches", nth: 3}
"""


@pytest.mark.long
def test_a_drill_on_a_site(new_run: Callable[[], SlurmRun], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    run = new_run()
    ended = run.milesbatch(
        "drill", QUICK, "--site", "devcluster", "--faults", plan, "--keep", tmp_path / "runs", "--json", timeout_s=500.0
    )
    assert ended.code == 0, ended.err
    found = {fault["fault"]: fault for fault in json.loads(ended.out)["faults"]}
    assert set(found) == {"rank-trained", "second-controller", "everything-killed", "preempted"}
    assert all(fault["ok"] and fault["fired"] and fault["digest_equal"] for fault in found.values())
    assert not run.job_ids()
