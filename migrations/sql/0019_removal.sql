-- Covered entries leave job by job, so the row of a job in the job table is written again at most once.
DROP FUNCTION scheduler.remove_covered(text, integer);

-- Removes entries up to ``upto_seq``, as far as a PRUNED entry covers them: all of the jobs that have an entry among the
-- ``entries_max / 2`` seqs from ``from_seq`` on, and at most ``entries_max``. Entries of one job leave in the order of
-- their seqs. Returns how many it removed of each job, and the last of them.
CREATE FUNCTION scheduler.remove_covered(tenant text, from_seq bigint, upto_seq bigint, entries_max integer)
RETURNS TABLE (removed_job text, removed_entries integer, removed_to bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog
SET work_mem = '64MB' -- The trigger that compares removed rows is given all of them.
AS $$
DECLARE
    covered bigint := least(upto_seq, scheduler.covered_to(tenant));
    leaving bigint[] := ARRAY(
        SELECT entry.seq
          FROM (SELECT job_id, min(seq) AS first_seq FROM scheduler.scheduler_log
                 WHERE tenant_id = tenant AND seq <= covered
                       AND seq >= from_seq AND seq < from_seq + (entries_max + 1) / 2 GROUP BY job_id) AS job
         CROSS JOIN LATERAL (SELECT seq FROM scheduler.scheduler_log
                              WHERE tenant_id = tenant AND job_id = job.job_id AND seq <= covered
                              ORDER BY seq LIMIT entries_max) AS entry
         ORDER BY job.first_seq, entry.seq LIMIT entries_max);
BEGIN
    RETURN QUERY WITH removed AS (
                      DELETE FROM scheduler.scheduler_log WHERE tenant_id = tenant AND seq = ANY (leaving)
                   RETURNING seq, job_id)
                 SELECT job_id, count(*)::integer, max(seq) FROM removed GROUP BY job_id;
END
$$;

REVOKE ALL ON FUNCTION scheduler.remove_covered(text, bigint, bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION scheduler.remove_covered(text, bigint, bigint, integer) TO tallystick_service;

-- VACUUM of the tables that entries leave, which changes no row: PostgreSQL 17 and newer can grant it to others than the
-- owner. Before, autovacuum comes by.
DO $$
DECLARE
    emptied regclass;
BEGIN
    IF current_setting('server_version_num')::integer >= 170000 THEN
        FOR emptied IN
            SELECT inhrelid FROM pg_inherits WHERE inhparent = 'scheduler.scheduler_log'::regclass
            UNION ALL SELECT unnest('{scheduler.jobs, scheduler.job_terms}'::regclass[])
        LOOP
            EXECUTE format('GRANT MAINTAIN ON %s TO tallystick_service', emptied);
        END LOOP;
    END IF;
END
$$;
