-- The roles of the ledger on a PostgreSQL server of your own, 15 or newer. Run once, as a superuser, in a database
-- made for it (CREATE DATABASE tallystick ENCODING 'UTF8' TEMPLATE template0); running it again sets the passwords again.
--
--   TALLY_OWNER_PASSWORD=... TALLY_SERVICE_PASSWORD=... psql -d tallystick -f deploy/postgres/roles.sql
--
-- tallystick_owner    owns schema and tables; `tally migrate` logs in as it (TALLY_MIGRATE_URL)
-- tallystick_service  what the service may do; has no login
-- tallystick          the service's login (TALLY_DATABASE_URL), a member of tallystick_service; owns nothing
-- auditor             who verifies with --dsn: reads what verification needs, writes nothing, and reads neither the secret
--                     of session tokens, nor the wrapped keys of private fields, nor what answers a repeated request.
--                     Made when TALLY_AUDITOR_PASSWORD is set. What it may read is granted once the tables are there: run
--                     this file again after the first `tally migrate`.

\set ON_ERROR_STOP on
\getenv owner_password TALLY_OWNER_PASSWORD
\getenv service_password TALLY_SERVICE_PASSWORD
\getenv auditor_password TALLY_AUDITOR_PASSWORD
\if :{?owner_password}
\else
DO $$ BEGIN RAISE EXCEPTION 'TALLY_OWNER_PASSWORD is not set'; END $$;
\endif
\if :{?service_password}
\else
DO $$ BEGIN RAISE EXCEPTION 'TALLY_SERVICE_PASSWORD is not set'; END $$;
\endif

BEGIN;
SELECT format('CREATE ROLE %I', name)
  FROM unnest(ARRAY['tallystick_owner', 'tallystick_service', 'tallystick']) AS name
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)
\gexec
-- What ends a line, as in a file that a variable was filled from, is no part of a password.
SELECT rtrim(:'owner_password', E'\r\n') AS owner_password, rtrim(:'service_password', E'\r\n') AS service_password \gset
ALTER ROLE tallystick_owner LOGIN PASSWORD :'owner_password';
ALTER ROLE tallystick LOGIN PASSWORD :'service_password';
-- Every query of the service is short: compiling one takes fifty times as long as running it.
ALTER ROLE tallystick SET jit = off;
GRANT tallystick_service TO tallystick;
SELECT format('ALTER DATABASE %I OWNER TO tallystick_owner', current_database())
\gexec
COMMIT;

\if :{?auditor_password}
BEGIN;
SELECT 'CREATE ROLE auditor' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'auditor')
\gexec
SELECT rtrim(:'auditor_password', E'\r\n') AS auditor_password \gset
ALTER ROLE auditor LOGIN PASSWORD :'auditor_password';
ALTER ROLE auditor SET default_transaction_read_only = on;
SELECT format('GRANT CONNECT ON DATABASE %I TO auditor', current_database())
\gexec
SELECT 'GRANT USAGE ON SCHEMA scheduler TO auditor' WHERE to_regnamespace('scheduler') IS NOT NULL
\gexec
SELECT format('GRANT SELECT ON scheduler.%I TO auditor', name)
  FROM unnest(ARRAY[
         'alembic_version', 'batch_snapshot', 'chain_heads', 'checkpoint_cosignature', 'checkpoint_timestamp',
         'commitments', 'follower_positions', 'job_index_left', 'job_terms', 'jobs',
         'ledger_identity', 'log_entries', 'merkle_head', 'merkle_tile', 'scheduler_log', 'search_fields', 'signing_keys'
       ]) AS name
 WHERE to_regclass(format('scheduler.%I', name)) IS NOT NULL
\gexec
COMMIT;
\endif
