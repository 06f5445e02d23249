-- The log and its heads as they were in November 2026, revision 0007.
CREATE SCHEMA scheduler;
CREATE TABLE scheduler.chain_heads (
    tenant_id text COLLATE "C" PRIMARY KEY,
    head_seq bigint NOT NULL,
    head_chain_link text COLLATE "C",
    head_hlc text COLLATE "C",
    updated_at timestamptz NOT NULL DEFAULT now()
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
CREATE TABLE scheduler.scheduler_log_p0 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 0);
CREATE TABLE scheduler.scheduler_log_p1 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 1);
CREATE TABLE scheduler.scheduler_log_p2 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 2);
CREATE TABLE scheduler.scheduler_log_p3 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 3);
CREATE TABLE scheduler.scheduler_log_p4 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 4);
CREATE TABLE scheduler.scheduler_log_p5 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 5);
CREATE TABLE scheduler.scheduler_log_p6 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 6);
CREATE TABLE scheduler.scheduler_log_p7 PARTITION OF scheduler.scheduler_log FOR VALUES WITH (MODULUS 8, REMAINDER 7);
