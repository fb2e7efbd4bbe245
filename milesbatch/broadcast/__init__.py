"""Weights from the trainer to the rollout workers over torch.distributed."""
