"""What the index of jobs needs of entries that left."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep the leaves of runs over entries that leave."""
    run_sql_file("0023_index_of_what_left.sql")
