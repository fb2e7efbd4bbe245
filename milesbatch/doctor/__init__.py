"""Is this machine, filesystem or cluster fit for runs? Probes that measure, and verdicts in plain words; without torch."""
