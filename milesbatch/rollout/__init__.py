"""The rollout role: a worker takes leases, runs episodes with its engine, and commits trajectories."""
