"""Ends and run times of jobs."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_files

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    """Run the SQL file of ``migrations/sql`` numbered 0026."""
    run_sql_files(down_revision, revision)
