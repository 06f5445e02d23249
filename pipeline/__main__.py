"""``python -m pipeline``, which ``tally pipeline`` executes."""

from pipeline.cli import main

main()
