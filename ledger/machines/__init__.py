"""What entries decide and what they add up to."""
