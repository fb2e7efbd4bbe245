"""Everything about bytes on disk: the one door for commits, the one builder of paths, digests, incarnations."""
