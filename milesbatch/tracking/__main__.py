"""``python -m milesbatch.tracking``: follows a run's events into MLflow, started by the controller."""

from milesbatch.role import run_role
from milesbatch.tracking.follow import main

if __name__ == "__main__":
    run_role(main)
