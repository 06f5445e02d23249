"""Jobs are listed by who created them."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and its index."""
    run_sql_file("0010_created_by.sql")
