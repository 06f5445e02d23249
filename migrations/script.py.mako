"""${message}."""

from app.store.migrate import run_sql_file

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Run the SQL of this revision."""
    run_sql_file("${up_revision}_${slug}.sql")
