-- Fields that a tenant's jobs are searched by, and which jobs have which values of them. A term is a hash of field and
-- value; what is found by it is checked against the log. built_to is the last job that was indexed of those that were there
-- when the fields were declared, null once all are; until then nothing is searched by terms.
CREATE TABLE scheduler.search_fields (
    tenant_id text COLLATE "C" PRIMARY KEY,
    fields text[] COLLATE "C" NOT NULL,
    built_to text COLLATE "C",
    declared_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE scheduler.job_terms (
    tenant_id text COLLATE "C" NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    term bigint NOT NULL,
    created_physical bigint NOT NULL,
    created_logical bigint NOT NULL,
    created_node text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant_id, job_id, term)
);
CREATE INDEX job_terms_newest ON scheduler.job_terms (tenant_id, term, created_physical, created_logical);

REVOKE ALL ON scheduler.search_fields, scheduler.job_terms FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE ON scheduler.search_fields TO tallystick_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON scheduler.job_terms TO tallystick_service;

-- Terms are of the job table's follower: whichever is emptied, both fill again.
CREATE TRIGGER followed_again AFTER TRUNCATE ON scheduler.job_terms
    FOR EACH STATEMENT EXECUTE FUNCTION scheduler.follow_again();

-- Nodes of a version that knows no terms follow beside newer ones while these take their place: not a tenant that has some.
CREATE FUNCTION scheduler.keep_behind_terms() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    IF EXISTS (SELECT FROM scheduler.search_fields WHERE tenant_id = NEW.tenant_id) THEN
        RAISE EXCEPTION 'scheduler.job_terms does not follow to seq % of %', NEW.seq, NEW.tenant_id;
    END IF;
    RETURN NEW;
END
$$;

REVOKE ALL ON FUNCTION scheduler.keep_behind_terms() FROM PUBLIC;

CREATE TRIGGER behind_terms BEFORE UPDATE ON scheduler.follower_positions
    FOR EACH ROW
    WHEN (NEW.seq > OLD.seq AND current_setting('tallystick.follows_terms', true) IS DISTINCT FROM 'yes')
    EXECUTE FUNCTION scheduler.keep_behind_terms();
