"""Chains are verified with psql alone."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Functions of the owner verify a chain, an entry and the entries of a job; those of revision 0018 are replaced."""
    run_sql_file("0022_verify_in_sql.sql")
