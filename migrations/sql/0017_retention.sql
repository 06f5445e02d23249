-- A prefix of a chain leaves the database where a PRUNED entry of the same chain covers it (docs/formats/retention.md).

-- Jobs of which an entry has left: the first 8 bytes of SHA-256 of each job id, in rows by the first 6 bits of these
-- bytes, one for each step in which entries were removed. So a job that left is told from one that never was, at 8 bytes
-- a job.
CREATE TABLE scheduler.departed_jobs (
    tenant_id text COLLATE "C" NOT NULL,
    bucket smallint NOT NULL,
    to_seq bigint NOT NULL,
    hashes bytea NOT NULL,
    PRIMARY KEY (tenant_id, bucket, to_seq)
);
ALTER TABLE scheduler.departed_jobs ALTER COLUMN hashes SET STORAGE EXTERNAL;
REVOKE ALL ON scheduler.departed_jobs FROM PUBLIC;
GRANT SELECT, INSERT ON scheduler.departed_jobs TO tallystick_service;

-- The highest to_seq of the PRUNED entries of a chain which name the entry about retention before them and hold a
-- signature, 0 without any. Whether the signature counts is for those to judge who have keys: an entry that no admitted
-- key signed is found by every verification.
CREATE FUNCTION scheduler.covered_to(tenant text) RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog
AS $$
    SELECT coalesce(max(said.to_seq), 0)
      FROM (SELECT seq, tenant_id,
                   CASE WHEN json_typeof(payload -> 'to_seq') = 'number'
                             AND json_typeof(payload -> 'after' -> 'seq') = 'number'
                             AND json_typeof(payload -> 'statement' -> 'signatures') = 'array'
                             AND json_array_length(payload -> 'statement' -> 'signatures') > 0
                        THEN (payload ->> 'to_seq')::numeric END AS to_seq,
                   (payload -> 'after' ->> 'seq') AS after_seq
              FROM scheduler.scheduler_log
             WHERE tenant_id = tenant AND tenant_id <> '_system' AND job_id = 'retention policy'
               AND action = 'PRUNED' AND origin IS NULL) AS said
     WHERE said.to_seq < said.seq
       AND NOT EXISTS (SELECT FROM scheduler.scheduler_log AS between_both
                        WHERE between_both.tenant_id = tenant AND between_both.job_id = 'retention policy'
                          AND between_both.seq > said.after_seq::numeric AND between_both.seq < said.seq)
$$;

-- Removes at most so many of the first entries of a chain, as far as a PRUNED entry covers them. Returns what it removed.
CREATE FUNCTION scheduler.remove_covered(tenant text, entries_max integer)
RETURNS TABLE (removed_seq bigint, removed_job text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog
AS $$
DECLARE
    first bigint := (SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = tenant);
BEGIN
    RETURN QUERY DELETE FROM scheduler.scheduler_log
                  WHERE tenant_id = tenant AND seq < first + entries_max AND seq <= scheduler.covered_to(tenant)
              RETURNING seq, job_id;
END
$$;

-- Every DELETE is compared with the PRUNED entries, also one of the owner.
CREATE FUNCTION scheduler.refuse_uncovered() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    IF EXISTS (SELECT FROM (SELECT tenant_id, max(seq) AS last FROM removed GROUP BY tenant_id) AS parts
                WHERE last > scheduler.covered_to(tenant_id)) OR EXISTS (SELECT FROM removed WHERE seq IS NULL) THEN
        RAISE EXCEPTION '% of %.% is refused: it is append only, and no PRUNED entry covers what would be removed',
                        TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END
$$;

DROP TRIGGER append_only_rows ON scheduler.scheduler_log;
CREATE TRIGGER append_only_rows BEFORE UPDATE ON scheduler.scheduler_log
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_change();

DO $$
DECLARE
    part regclass;
BEGIN
    FOR part IN
        SELECT 'scheduler.scheduler_log'::regclass
        UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = 'scheduler.scheduler_log'::regclass
    LOOP
        EXECUTE format(
            'CREATE TRIGGER append_only_prefix AFTER DELETE ON %s REFERENCING OLD TABLE AS removed'
            ' FOR EACH STATEMENT EXECUTE FUNCTION scheduler.refuse_uncovered()', part);
    END LOOP;
END
$$;

REVOKE ALL ON FUNCTION scheduler.covered_to(text), scheduler.remove_covered(text, integer),
    scheduler.refuse_uncovered() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION scheduler.covered_to(text), scheduler.remove_covered(text, integer) TO tallystick_service;
