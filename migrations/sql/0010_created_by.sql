-- Jobs are listed by who created them, as their first JobCreated says. Where that is not known or private, a row has no
-- name, and the index no row.
ALTER TABLE scheduler.jobs ADD COLUMN created_by text COLLATE "C";
CREATE INDEX jobs_newest_by_actor ON scheduler.jobs (tenant_id, created_by, status, created_physical, created_logical)
    WHERE created_by IS NOT NULL;

-- Events that say who sent them may have come in bundles of newer ledgers: such a chain is followed again from its
-- first entry. In a canonical payload ``actor`` is the first member.
DELETE FROM scheduler.follower_positions
 WHERE follower = 'jobs'
   AND tenant_id IN (SELECT tenant_id FROM scheduler.scheduler_log WHERE left(payload::text, 9) = '{"actor":');
