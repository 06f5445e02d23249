-- Followers come behind the commit: what one derives from a chain, it writes together with how far it has come.
-- A tenant without a row here has not been followed: nothing that the follower wrote of it counts.
CREATE TABLE scheduler.follower_positions (
    follower text COLLATE "C" NOT NULL,
    tenant_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL CONSTRAINT follower_positions_seq CHECK (seq >= 0),
    PRIMARY KEY (follower, tenant_id)
) WITH (fillfactor = 50);

-- A job names the entries that count; until now its row was a copy of what they say. The follower makes all rows again.
TRUNCATE scheduler.jobs;
ALTER TABLE scheduler.jobs ALTER COLUMN state DROP NOT NULL, ALTER COLUMN state TYPE bigint[] USING NULL;
ALTER TABLE scheduler.jobs RENAME COLUMN state TO seqs;
ALTER TABLE scheduler.jobs ALTER COLUMN seqs SET NOT NULL;

REVOKE ALL ON scheduler.follower_positions FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE ON scheduler.follower_positions TO tallystick_service;
-- Of a tenant that is followed from its first entry on, the table is emptied first.
GRANT DELETE ON scheduler.jobs TO tallystick_service;

-- A follower's table that is emptied fills again: its name is the follower's.
CREATE FUNCTION scheduler.follow_again() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    DELETE FROM scheduler.follower_positions WHERE follower = TG_TABLE_NAME;
    RETURN NULL;
END
$$;

REVOKE ALL ON FUNCTION scheduler.follow_again() FROM PUBLIC;

CREATE TRIGGER followed_again AFTER TRUNCATE ON scheduler.jobs
    FOR EACH STATEMENT EXECUTE FUNCTION scheduler.follow_again();

-- Lists go through the index from its newer end, where it grows; a page is put in order within one (physical, logical).
DROP INDEX scheduler.jobs_newest, scheduler.jobs_newest_by_status;
CREATE INDEX jobs_newest ON scheduler.jobs (tenant_id, created_physical, created_logical);
CREATE INDEX jobs_newest_by_status ON scheduler.jobs (tenant_id, status, created_physical, created_logical);
ALTER TABLE scheduler.jobs SET (fillfactor = 90);

-- An HLC is unique by its parts, which ranges of time are found by too: one index instead of two.
DROP INDEX scheduler.scheduler_log_hlc;
ALTER TABLE scheduler.scheduler_log
    DROP CONSTRAINT scheduler_log_t_hlc,
    ADD CONSTRAINT scheduler_log_hlc UNIQUE (tenant_id, hlc_physical, hlc_logical, hlc_node);
