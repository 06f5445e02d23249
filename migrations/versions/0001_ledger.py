"""The ledger: chains, snapshots, Merkle trees, merged jobs and what nodes keep in Postgres."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make everything from nothing."""
    run_sql_file("0001_ledger.sql")
