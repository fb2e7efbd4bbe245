"""The trainer role: the ranks of one torch.distributed job. Rank 0 records batches, publishes weights, commits checkpoints."""
