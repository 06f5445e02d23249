"""The secret that session tokens are bound with."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; the next start makes the secret."""
    run_sql_file("0007_session_secret.sql")
