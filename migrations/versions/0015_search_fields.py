"""Fields that jobs are searched by, and which jobs have which values."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables."""
    run_sql_file("0015_search_fields.sql")
