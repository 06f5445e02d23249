"""Which entries say what is promised."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, and the index of its entries in the log."""
    run_sql_file("0013_commitments.sql")
