"""What one node is and keeps beside its WAL: ids, positions, clock, session tokens, forks and ranges given up."""
