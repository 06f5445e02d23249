"""What Alembic runs: its own commands end here as ``app.store.migrate.migrate`` does.

The URL comes from ``migrate`` or, with the ``alembic`` command, from ``TALLY_MIGRATE_URL``; ``--sql`` needs none.
"""

import asyncio
import os

from alembic import context

from app.store.migrate import print_statements, run_in_transaction

url = context.config.attributes.get("url") or os.environ.get("TALLY_MIGRATE_URL")
if context.is_offline_mode():
    print_statements()
elif not url:
    raise SystemExit("Say with TALLY_MIGRATE_URL which database; its user must own the schema.")
else:
    asyncio.run(run_in_transaction(url))
