"""One node and the state beside its WAL: ids, positions, clock, session tokens, forks and abandoned ranges."""
