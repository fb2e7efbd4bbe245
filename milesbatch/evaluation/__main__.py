"""``python -m milesbatch.evaluation``: evaluates policy versions of a run, started by the controller."""

from milesbatch.evaluation.worker import main
from milesbatch.role import run_role

if __name__ == "__main__":
    run_role(main)
