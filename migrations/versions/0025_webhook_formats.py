"""Formats of webhooks, and replays."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    run_sql_file("0025_webhook_formats.sql")
