#!/bin/bash
# A hot standby of the server "postgres": its copy is taken once, and followed from then on.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  mkdir -p "$PGDATA"
  chown -R postgres:postgres "$PGDATA"
  chmod 700 "$PGDATA"
  PGPASSWORD=$REPLICATION_PASSWORD gosu postgres pg_basebackup -D "$PGDATA" -X stream --checkpoint=fast \
    -d "host=postgres user=replicator application_name=standby" --write-recovery-conf
fi
exec gosu postgres postgres
