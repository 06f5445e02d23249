"""Of the cosignatures of one witness in one minute the last is kept."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the trigger, and narrow what may not be removed."""
    run_sql_file("0021_superseded_cosignatures.sql")
