"""``python3 slurm/devcluster COMMAND``: nothing needs to be installed but Slurm's packages, and `up` sees to those."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from devcluster.commands import main

if __name__ == "__main__":
    sys.exit(main())
