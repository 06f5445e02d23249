-- Indexes that take less room; decision 0033 says why these are enough.

-- The guard against forks keeps two hashes of 64 bits in place of the 64 digits of a link. Equal links have equal hashes,
-- so it lets nothing through that it refused before. Any text has hashes, that of an edited row too.
ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT scheduler_log_prev_chain_link;
CREATE UNIQUE INDEX scheduler_log_prev_chain_link ON scheduler.scheduler_log
    (tenant_id, hashtextextended(prev_chain_link, '0'), hashtextextended(prev_chain_link, '-1')) NULLS NOT DISTINCT;

DO $$
DECLARE
    part record;
BEGIN
    -- Who is refused is told the name of a partition's index.
    FOR part IN SELECT inhrelid::regclass AS index, relname AS partition
                  FROM pg_inherits JOIN pg_index ON indexrelid = inhrelid JOIN pg_class c ON c.oid = indrelid
                 WHERE inhparent = 'scheduler.scheduler_log_prev_chain_link'::regclass
    LOOP
        EXECUTE format('ALTER INDEX %s RENAME TO %I', part.index, part.partition || '_prev_chain_link');
    END LOOP;
    -- Entries come in the order of these two, those of one chain always and those of jobs mostly: from now on their pages
    -- are filled up.
    FOR part IN SELECT inhrelid::regclass AS index FROM pg_inherits
                 WHERE inhparent IN ('scheduler.scheduler_log_pkey'::regclass, 'scheduler.scheduler_log_job'::regclass)
    LOOP
        EXECUTE format('ALTER INDEX %s SET (fillfactor = 100)', part.index);
    END LOOP;
END
$$;

-- All jobs of a tenant are those of each status: one index serves both lists.
DROP INDEX scheduler.jobs_newest;
ALTER TABLE scheduler.jobs RESET (fillfactor);
