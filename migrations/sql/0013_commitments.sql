-- Which entries say what is promised, by seq: accepted proposals other than revocations, and capacities of nodes. What
-- they say stands in the log. ended_seq is of the entry from which on one holds no longer: a revocation, or the node's
-- next capacity. The follower of the job table keeps this one with it, in the same transaction.
CREATE TABLE scheduler.commitments (
    tenant_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    ended_seq bigint CONSTRAINT commitments_ended CHECK (ended_seq > seq),
    subject text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant_id, seq)
);
-- What holds now, by where it began; and by node, its capacity.
CREATE INDEX commitments_live ON scheduler.commitments (tenant_id, seq) WHERE ended_seq IS NULL;
CREATE INDEX commitments_nodes ON scheduler.commitments (tenant_id, subject)
 WHERE ended_seq IS NULL AND subject >= 'node:' AND subject < 'node;';

REVOKE ALL ON scheduler.commitments FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON scheduler.commitments TO tallystick_service;

-- Entries about commitments, among all others of a chain.
CREATE INDEX scheduler_log_commitments ON scheduler.scheduler_log (tenant_id, seq)
 WHERE action IN ('PROPOSE_ACCEPTED', 'PROPOSE_REJECTED', 'CAPACITY_SET');

-- Both tables are of one follower: whichever is emptied, both fill again.
CREATE OR REPLACE FUNCTION scheduler.follow_again() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    DELETE FROM scheduler.follower_positions WHERE follower = 'jobs';
    RETURN NULL;
END
$$;

CREATE TRIGGER followed_again AFTER TRUNCATE ON scheduler.commitments
    FOR EACH STATEMENT EXECUTE FUNCTION scheduler.follow_again();
