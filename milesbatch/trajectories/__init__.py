"""Trajectories on disk: the recorded sample, its Arrow schema, writer and reader. Imports without torch."""
