"""Proving a run from its files alone: every promise of the design that files can show, without torch."""
