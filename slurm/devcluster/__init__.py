"""A development cluster: real Slurm, several nodes on one machine. See ``slurm/README.md``."""
