"""What happened when, over all processes and incarnations of a run: from event logs to slices, marks and troubles."""
