"""How far followers have come, the job table the first of them."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of positions; the job table of an older ledger is made again."""
    run_sql_file("0008_followers.sql")
