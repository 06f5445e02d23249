"""Figures of jobs."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, and what each job counts as."""
    run_sql_file("0024_job_figures.sql")
