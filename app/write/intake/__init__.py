"""From a validated request to the WAL, and the answer at the level it asked for."""
