"""Indexes that take less room: the guard against forks keeps hashes, one index serves both lists of jobs."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Build the one index anew, drop the other."""
    run_sql_file("0009_less_room.sql")
