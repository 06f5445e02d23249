-- Figures of jobs: how many jobs of a tenant have which status, by hour, data centre, error and declared field, and how
-- long they ran. They follow from the rows of the job table, each of which says what its job counts as.

-- The follower makes all rows again: an earlier one did not say what its job counts as.
TRUNCATE scheduler.jobs;
ALTER TABLE scheduler.jobs ADD COLUMN figure text COLLATE "C";

-- A period of so many hours begins at a multiple of them. runs are classes of run times in order, run_jobs the jobs in each.
CREATE TABLE scheduler.job_figures (
    tenant_id text COLLATE "C" NOT NULL,
    field text COLLATE "C" NOT NULL,
    hours integer NOT NULL,
    hour integer NOT NULL,
    dc text COLLATE "C" NOT NULL,
    value text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    jobs bigint NOT NULL,
    traced bigint NOT NULL,
    runs smallint[] NOT NULL,
    run_jobs integer[] NOT NULL,
    PRIMARY KEY (tenant_id, field, hours, hour, dc, value, status)
) WITH (fillfactor = 50);

REVOKE ALL ON scheduler.job_figures FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON scheduler.job_figures TO tallystick_service;

-- Figures are of the job table's follower: whichever is emptied, both fill again.
CREATE TRIGGER followed_again AFTER TRUNCATE ON scheduler.job_figures
    FOR EACH STATEMENT EXECUTE FUNCTION scheduler.follow_again();

-- Nodes of a version that knows no figures follow beside newer ones while these take their place: they stop before the
-- first entry about a job.
CREATE FUNCTION scheduler.keep_behind_figures() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    IF EXISTS (SELECT FROM scheduler.scheduler_log
                WHERE tenant_id = NEW.tenant_id AND seq > OLD.seq AND seq <= NEW.seq
                  AND action IN ('ENQUEUE', 'DEQUEUE', 'DISPATCH', 'WORKFLOW_COMPLETE', 'EXECUTE', 'CANCEL', 'CANCEL_ACK',
                                 'COMPLETE', 'FAIL', 'TIMEOUT', 'CONFLICT')) THEN
        RAISE EXCEPTION 'scheduler.job_figures does not follow to seq % of %', NEW.seq, NEW.tenant_id;
    END IF;
    RETURN NEW;
END
$$;

REVOKE ALL ON FUNCTION scheduler.keep_behind_figures() FROM PUBLIC;

CREATE TRIGGER behind_figures BEFORE UPDATE ON scheduler.follower_positions
    FOR EACH ROW
    WHEN (NEW.seq > OLD.seq AND current_setting('tallystick.follows_figures', true) IS DISTINCT FROM 'yes')
    EXECUTE FUNCTION scheduler.keep_behind_figures();

-- VACUUM, from PostgreSQL 17 on, as of the job table.
DO $$
BEGIN
    IF current_setting('server_version_num')::integer >= 170000 THEN
        GRANT MAINTAIN ON scheduler.job_figures TO tallystick_service;
    END IF;
END
$$;
