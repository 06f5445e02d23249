"""Snapshots without a signature."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a snapshot have no envelope."""
    run_sql_file("0016_unsigned_snapshots.sql")
