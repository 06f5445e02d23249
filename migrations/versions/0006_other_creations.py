"""States of jobs remember creations that differ from the first."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rewrite the states of jobs that were created in several ways."""
    run_sql_file("0006_other_creations.sql")
