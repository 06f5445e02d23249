"""What outsiders said of checkpoints: cosignatures and time stamps."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two append-only tables."""
    run_sql_file("0003_anchors.sql")
