"""${message}."""

from pathlib import Path

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_file

revision = ${'"%s"' % up_revision}
down_revision = ${'"%s"' % down_revision if down_revision else None}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Say what becomes of what is there."""
    run_sql_file(f"{Path(__file__).stem}.sql")
