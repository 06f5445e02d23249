"""Prefixes of chains leave the database, where a PRUNED entry says so."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let covered rows be removed by one function alone, and keep which jobs they were of."""
    run_sql_file("0017_retention.sql")
