"""Keys that change: which sign now, and why one was revoked."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add what the rows of keys lack."""
    run_sql_file("0002_key_changes.sql")
