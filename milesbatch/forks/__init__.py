"""A run that begins with the state of another one. No torch; the parent is only read."""
