"""``python -m milesbatch.rollout``: one rollout worker, started by the controller."""

from milesbatch.role import run_role
from milesbatch.rollout.worker import main

if __name__ == "__main__":
    run_role(main)
