"""The index of jobs of each chain."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep the runs of the index, and what a prune takes from under them."""
    run_sql_file("0020_job_index.sql")
