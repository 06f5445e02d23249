#!/bin/bash
# What a primary has that a synchronous standby follows; run once, when the server is made.
set -eu
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -v password="$REPLICATION_PASSWORD" <<'SQL'
CREATE ROLE replicator REPLICATION LOGIN PASSWORD :'password';
-- In force from the next start of the server, which is the real one: nothing is committed that the standby does not hold.
ALTER SYSTEM SET synchronous_standby_names = 'standby';
SQL
echo "host replication replicator all scram-sha-256" >> "$PGDATA/pg_hba.conf"
