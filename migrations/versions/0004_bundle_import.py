"""Imports of bundles: how far each has come."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    run_sql_file("0004_bundle_import.sql")
