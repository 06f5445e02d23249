-- The ledger: chains, their heads, snapshots and Merkle trees; merged job state; what nodes keep here.
-- Runs as the owner. Text that is compared, sorted or hashed has COLLATE "C": its order is that of its bytes.
-- Links and digests are lowercase hex. Columns of type json keep the text they were given, which jsonb does not.

-- The role whose members are the service. It owns nothing, so it can neither alter tables nor disable triggers.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'tallystick_service') THEN
        CREATE ROLE tallystick_service NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN
        NULL; -- another database of this server was migrated at the same moment
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'role tallystick_service does not exist and % may not create it', current_user
            USING HINT = 'run deploy/postgres/roles.sql as a superuser first';
END
$$;

CREATE TABLE scheduler.ledger_identity (
    "only" boolean PRIMARY KEY DEFAULT true CONSTRAINT ledger_identity_one_row CHECK ("only"),
    log_origin text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- One row a tenant from its first write on, so that there is always a row to lock.
CREATE TABLE scheduler.chain_heads (
    tenant_id text COLLATE "C" PRIMARY KEY,
    head_seq bigint NOT NULL CONSTRAINT chain_heads_seq CHECK (head_seq >= 0),
    head_chain_link text COLLATE "C",
    head_hlc text COLLATE "C",
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT chain_heads_link CHECK ((head_seq = 0) = (head_chain_link IS NULL)),
    CONSTRAINT chain_heads_hlc CHECK ((head_seq = 0) = (head_hlc IS NULL))
) WITH (fillfactor = 50);

CREATE TABLE scheduler.scheduler_log (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 100),
    tenant_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    t_hlc text COLLATE "C" NOT NULL,
    hlc_physical bigint NOT NULL,
    hlc_logical bigint NOT NULL,
    hlc_node text COLLATE "C" NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    action text COLLATE "C" NOT NULL,
    link_version smallint NOT NULL,
    prev_chain_link text COLLATE "C",
    chain_link text COLLATE "C" NOT NULL,
    payload_digest text COLLATE "C" NOT NULL,
    payload json NOT NULL,
    origin json,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT scheduler_log_pkey PRIMARY KEY (tenant_id, seq),
    CONSTRAINT scheduler_log_prev_chain_link UNIQUE NULLS NOT DISTINCT (tenant_id, prev_chain_link),
    CONSTRAINT scheduler_log_t_hlc UNIQUE NULLS NOT DISTINCT (tenant_id, t_hlc),
    CONSTRAINT scheduler_log_seq CHECK (seq >= 1)
) PARTITION BY HASH (tenant_id);

CREATE INDEX scheduler_log_hlc ON scheduler.scheduler_log (tenant_id, hlc_physical, hlc_logical, hlc_node);
CREATE INDEX scheduler_log_job ON scheduler.scheduler_log (tenant_id, job_id, seq);

DO $$
BEGIN
    FOR remainder IN 0..7 LOOP
        EXECUTE format(
            'CREATE TABLE scheduler.scheduler_log_p%s PARTITION OF scheduler.scheduler_log'
            ' FOR VALUES WITH (MODULUS 8, REMAINDER %s)', remainder, remainder);
    END LOOP;
END
$$;

CREATE TABLE scheduler.batch_snapshot (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id text COLLATE "C" NOT NULL,
    from_seq bigint NOT NULL,
    to_seq bigint NOT NULL,
    snapshot_hlc text COLLATE "C" NOT NULL,
    from_chain_link text COLLATE "C" NOT NULL,
    to_chain_link text COLLATE "C" NOT NULL,
    entry_count bigint NOT NULL,
    merkle_root text COLLATE "C" NOT NULL,
    dsse_envelope json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT batch_snapshot_from_seq UNIQUE (tenant_id, from_seq),
    CONSTRAINT batch_snapshot_range CHECK (from_seq >= 1 AND to_seq >= from_seq)
);

-- The newest tree head of each tenant; ``checkpoint`` is its signed note, null until one was signed.
CREATE TABLE scheduler.merkle_head (
    tenant_id text COLLATE "C" PRIMARY KEY,
    tree_size bigint NOT NULL CONSTRAINT merkle_head_size CHECK (tree_size >= 0),
    root_hash text COLLATE "C" NOT NULL,
    checkpoint text,
    signed_at timestamptz
) WITH (fillfactor = 50);

-- Tiles of the C2SP tlog-tiles specification: up to 256 hashes of 32 bytes. Hashes do not compress.
CREATE TABLE scheduler.merkle_tile (
    tenant_id text COLLATE "C" NOT NULL,
    level smallint NOT NULL,
    tile_index bigint NOT NULL,
    hashes bytea NOT NULL,
    PRIMARY KEY (tenant_id, level, tile_index)
);
ALTER TABLE scheduler.merkle_tile ALTER COLUMN hashes SET STORAGE EXTERNAL;

-- Merged state of every job; ``state`` is the canonical JSON of the fold over its entries.
CREATE TABLE scheduler.jobs (
    tenant_id text COLLATE "C" NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    created_physical bigint,
    created_logical bigint,
    created_node text COLLATE "C",
    last_seq bigint NOT NULL,
    state json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, job_id)
) WITH (fillfactor = 70);

CREATE INDEX jobs_newest ON scheduler.jobs
    (tenant_id, created_physical DESC, created_logical DESC, created_node DESC, job_id);
CREATE INDEX jobs_newest_by_status ON scheduler.jobs
    (tenant_id, status, created_physical DESC, created_logical DESC, created_node DESC, job_id);

-- Of a table that was never analyzed PostgreSQL believes that a tenant has a row, so that any index which begins with the
-- tenant finds a job. Such a plan is kept, and reads a whole chain for each job, until autovacuum has come by. So these
-- tables begin with the statistics of a small ledger: too many tenants for a list of the frequent, a few rows each.
INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action,
                                     link_version, prev_chain_link, chain_link, payload_digest, payload)
SELECT 'tenant-' || tenant, seq, seq || ':0:n', seq, 0, 'n', 'job-' || seq % 5, 'ENQUEUE', 2,
       md5(tenant || ':' || seq), md5(tenant || ':' || seq), md5(tenant || ':' || seq), '{}'
  FROM generate_series(1, 1000) AS tenant, generate_series(1, 20) AS seq;
INSERT INTO scheduler.jobs (tenant_id, job_id, status, created_physical, created_logical, created_node, last_seq, state)
SELECT 'tenant-' || tenant, 'job-' || job, (ARRAY['RUNNING', 'COMPLETED', 'FAILED'])[1 + job % 3], job, 0, 'n', job, '{}'
  FROM generate_series(1, 150) AS tenant, generate_series(1, 40) AS job;
ANALYZE scheduler.scheduler_log;
ANALYZE scheduler.jobs;
-- Within a savepoint it makes new files, which PostgreSQL takes for never analyzed and so for ten pages at least.
SAVEPOINT analyzed;
TRUNCATE scheduler.scheduler_log, scheduler.jobs RESTART IDENTITY;
RELEASE SAVEPOINT analyzed;

CREATE TABLE scheduler.idempotency (
    tenant_id text COLLATE "C" NOT NULL,
    route smallint NOT NULL,
    key text COLLATE "C" NOT NULL,
    line integer NOT NULL,
    body_digest bytea NOT NULL,
    seq bigint NOT NULL,
    epoch bigint NOT NULL,
    lsn bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, route, key, line)
);

CREATE INDEX idempotency_created_at ON scheduler.idempotency (created_at);

-- How far each node's WAL is chained: the fence. Moved by the appender in its own transaction.
CREATE TABLE scheduler.wal_positions (
    node_id text COLLATE "C" PRIMARY KEY,
    wal_id text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    chained_lsn bigint NOT NULL CONSTRAINT wal_positions_chained_lsn CHECK (chained_lsn >= 0),
    seen_durable_lsn bigint NOT NULL CONSTRAINT wal_positions_seen_durable_lsn CHECK (seen_durable_lsn >= 0),
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

CREATE TABLE scheduler.wal_epochs (
    node_id text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    end_lsn bigint NOT NULL,
    PRIMARY KEY (node_id, epoch)
);

-- Whose job ids begin with this region and carry this gate.
CREATE TABLE scheduler.job_id_claims (
    region text COLLATE "C" NOT NULL,
    gate text COLLATE "C" NOT NULL,
    node_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (region, gate)
);

CREATE TABLE scheduler.signing_keys (
    key_id text COLLATE "C" PRIMARY KEY,
    algorithm text NOT NULL,
    public_key_pem text NOT NULL,
    not_before timestamptz NOT NULL,
    not_after timestamptz,
    revoked_from_hlc text COLLATE "C",
    node_id text COLLATE "C" NOT NULL
);

-- Beaten on the primary, read on a standby: its age is how far the standby is behind.
CREATE TABLE scheduler.heartbeat (
    "only" boolean PRIMARY KEY DEFAULT true CONSTRAINT heartbeat_one_row CHECK ("only"),
    beat_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE VIEW scheduler.log_entries AS
SELECT id, tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action, link_version,
       prev_chain_link, chain_link, payload_digest, payload::jsonb AS payload, origin, created_at
  FROM scheduler.scheduler_log;

-- Append only. Row triggers of the parent are inherited by its partitions; TRUNCATE triggers are not.

CREATE FUNCTION scheduler.refuse_change() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    RAISE EXCEPTION '% of %.% is refused: it is append only', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;

CREATE TRIGGER append_only_rows BEFORE UPDATE OR DELETE ON scheduler.scheduler_log
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_change();
CREATE TRIGGER append_only_rows BEFORE UPDATE OR DELETE ON scheduler.batch_snapshot
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_change();

DO $$
DECLARE
    append_only regclass;
BEGIN
    FOR append_only IN
        SELECT 'scheduler.scheduler_log'::regclass
        UNION ALL SELECT 'scheduler.batch_snapshot'::regclass
        UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = 'scheduler.scheduler_log'::regclass
    LOOP
        EXECUTE format(
            'CREATE TRIGGER append_only_table BEFORE TRUNCATE ON %s'
            ' FOR EACH STATEMENT EXECUTE FUNCTION scheduler.refuse_change()', append_only);
    END LOOP;
END
$$;

-- What the service may do. Nothing is granted on partitions: the way to a row is through the table.

REVOKE ALL ON ALL TABLES IN SCHEMA scheduler FROM PUBLIC;
REVOKE ALL ON FUNCTION scheduler.refuse_change() FROM PUBLIC;
GRANT USAGE ON SCHEMA scheduler TO tallystick_service;
GRANT SELECT ON scheduler.alembic_version, scheduler.log_entries TO tallystick_service;
GRANT SELECT, INSERT ON scheduler.scheduler_log, scheduler.batch_snapshot TO tallystick_service;
GRANT SELECT, INSERT, UPDATE ON
    scheduler.ledger_identity, scheduler.chain_heads, scheduler.merkle_head, scheduler.merkle_tile,
    scheduler.jobs, scheduler.idempotency, scheduler.wal_positions, scheduler.wal_epochs,
    scheduler.job_id_claims, scheduler.signing_keys, scheduler.heartbeat
    TO tallystick_service;
GRANT DELETE ON scheduler.idempotency TO tallystick_service;
