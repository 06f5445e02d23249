"""How far the chains of other ledgers were imported."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    run_sql_file("0012_exchange.sql")
