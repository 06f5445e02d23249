"""Leases on the WALs of nodes."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    run_sql_file("0011_wal_leases.sql")
