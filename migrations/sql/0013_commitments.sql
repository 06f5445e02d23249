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

-- Nodes of a version that knows no commitments follow beside newer ones while these take their place. They keep the job
-- table alone, so they stop before the first entry that belongs into the other.
CREATE FUNCTION scheduler.keep_behind_commitments() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    IF EXISTS (SELECT FROM scheduler.scheduler_log
                WHERE tenant_id = NEW.tenant_id AND seq > OLD.seq AND seq <= NEW.seq AND origin IS NULL
                  AND action IN ('PROPOSE_ACCEPTED', 'CAPACITY_SET')) THEN
        RAISE EXCEPTION 'scheduler.commitments does not follow to seq % of %', NEW.seq, NEW.tenant_id;
    END IF;
    RETURN NEW;
END
$$;

REVOKE ALL ON FUNCTION scheduler.keep_behind_commitments() FROM PUBLIC;

CREATE TRIGGER behind_commitments BEFORE UPDATE ON scheduler.follower_positions
    FOR EACH ROW
    WHEN (NEW.seq > OLD.seq AND current_setting('tallystick.follows_commitments', true) IS DISTINCT FROM 'yes')
    EXECUTE FUNCTION scheduler.keep_behind_commitments();
