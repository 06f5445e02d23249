"""Chains are verified with psql alone."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add functions of the owner that verify a chain, an entry and the entries of a job."""
    run_sql_file("0018_verify_in_sql.sql")
