"""Alembic migrations, one a version; the SQL itself is in ``sql/``, one file a change."""
