"""Private fields, the wrapped keys of those they are about, and what the chain must say of both."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables; nothing that is there changes."""
    run_sql_file("0005_private_fields.sql")
