"""SQL of what is derived of jobs: their table, its figures, searches, and the index that snapshots sign."""
