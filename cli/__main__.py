"""``python -m cli`` is ``tally``."""

from cli import main

main()
