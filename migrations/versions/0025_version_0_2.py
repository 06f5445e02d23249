"""Retention, removal, the index of jobs, verification in SQL and figures of jobs: the rest of version 0.2.0."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_files

revision = "0025"
down_revision = "0015"


def upgrade() -> None:
    """Run the SQL files of ``migrations/sql`` numbered 0016 to 0025."""
    run_sql_files(down_revision, revision)
