"""What a run's trajectories say: which of them count, scans over millions, SQL, statistics. Imports without torch."""
