"""Evaluation: chosen policy versions answer held-out prompts. A reader of the run, never a part of its training."""
