"""A run's life as Slurm jobs: submitting, the process in the batch script, workers that join, ending and going on."""
