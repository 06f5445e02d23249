"""The ledger of version 0.1.0: chains, snapshots, Merkle trees, the job table, anchors, imports, private fields."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_files

revision = "0010"
down_revision = None


def upgrade() -> None:
    """Run the SQL files of ``migrations/sql`` numbered 0001 to 0010."""
    run_sql_files(down_revision, revision)
