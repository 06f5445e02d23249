"""``python -m app.cli`` is ``tally``."""

from app.cli import main

main()
