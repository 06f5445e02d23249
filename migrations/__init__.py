"""Alembic migrations; the SQL itself is in ``sql/``, one file a revision."""
