"""Receivers of entries, how far each has confirmed them, and what it refused."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables."""
    run_sql_file("0014_webhooks.sql")
