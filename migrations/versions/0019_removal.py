"""Rows that a prune covers leave job by job."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the function that removes covered rows."""
    run_sql_file("0019_removal.sql")
