-- The log as it was first asked for: one table, three indexes, payloads as jsonb.
CREATE SCHEMA scheduler;
CREATE TABLE scheduler.scheduler_log (
    id bigserial PRIMARY KEY,
    t_hlc text NOT NULL,
    job_id text NOT NULL,
    action text NOT NULL,
    prev_chain_link text,
    chain_link text NOT NULL,
    payload jsonb NOT NULL,
    tenant_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX idx_scheduler_log_hlc ON scheduler.scheduler_log (t_hlc);
CREATE INDEX idx_scheduler_log_tenant_hlc ON scheduler.scheduler_log (tenant_id, t_hlc);
CREATE INDEX idx_scheduler_log_job ON scheduler.scheduler_log (job_id);
