"""Tracking: curves for people, fed from the event logs. A dead or slow tracking server never slows training."""
