"""State machines over entries: commitments and their verdicts, and the states of jobs."""
