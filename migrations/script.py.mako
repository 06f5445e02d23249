"""${message}."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_files

revision = ${'"%s"' % up_revision}
down_revision = ${'"%s"' % down_revision if down_revision else None}


def upgrade() -> None:
    """Say what becomes of what is there."""
    run_sql_files(down_revision, revision)
