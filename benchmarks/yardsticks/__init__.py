"""What rows are compared with, frozen: nothing here imports the project, so that a yardstick stays as long as it is
when the project gets better. A change needs a decision record (docs/decisions/0030-yardsticks-are-frozen.md)."""
