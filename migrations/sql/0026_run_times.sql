-- When a job ended and how long it ran are columns, so that lists go by them and figures have exact extremes of run times.

-- The follower makes all rows and figures again: an earlier one did not write these columns.
TRUNCATE scheduler.jobs, scheduler.job_figures;
ALTER TABLE scheduler.jobs ADD COLUMN ended_ms bigint, ADD COLUMN run_ms bigint;
ALTER TABLE scheduler.job_figures ADD COLUMN run_min_ms bigint, ADD COLUMN run_max_ms bigint;

-- Jobs older than a declaration of search fields are indexed in the order of the log: built_to is a seq.
ALTER TABLE scheduler.search_fields ALTER COLUMN built_to TYPE bigint USING CASE WHEN built_to IS NOT NULL THEN 0 END;

CREATE INDEX jobs_by_end ON scheduler.jobs (tenant_id, status, ended_ms, created_physical) WHERE ended_ms IS NOT NULL;
CREATE INDEX jobs_by_run_time ON scheduler.jobs (tenant_id, status, run_ms, created_physical) WHERE run_ms IS NOT NULL;

-- Nodes of a version that does not write them stop before the first entry about a job, as those that know no figures did.
DROP TRIGGER behind_figures ON scheduler.follower_positions;
ALTER FUNCTION scheduler.keep_behind_figures() RENAME TO keep_behind_run_times;
CREATE TRIGGER behind_run_times BEFORE UPDATE ON scheduler.follower_positions
    FOR EACH ROW
    WHEN (NEW.seq > OLD.seq AND current_setting('tallystick.follows_run_times', true) IS DISTINCT FROM 'yes')
    EXECUTE FUNCTION scheduler.keep_behind_run_times();
