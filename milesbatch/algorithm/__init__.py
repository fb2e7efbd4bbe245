"""The mathematics of a train step: advantages, packing, losses, schedules. No files, no processes."""
