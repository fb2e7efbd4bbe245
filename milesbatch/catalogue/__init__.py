"""The memory of runs: what was tried, how it ended, what it cost."""
