-- Beside the keys of entries that left: the leaves of the runs of the index of jobs that a later run is merged of, so that
-- runs over what left and what stays can be made again (docs/formats/job-index.md). None in rows of before.
ALTER TABLE scheduler.job_index_left ADD COLUMN runs bytea[] NOT NULL DEFAULT '{}';
ALTER TABLE scheduler.job_index_left ALTER COLUMN runs SET STORAGE EXTERNAL;
