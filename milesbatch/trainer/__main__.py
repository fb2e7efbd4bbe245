"""``python -m milesbatch.trainer``: one trainer rank, started by the controller."""

from milesbatch.role import run_role
from milesbatch.trainer.rank import main

if __name__ == "__main__":
    run_role(main)
