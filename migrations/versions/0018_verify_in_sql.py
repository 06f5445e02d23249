"""Chains are verified with psql alone: revision 0022 makes the functions."""

from app.store.migrate import downgrade as downgrade

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change nothing."""
