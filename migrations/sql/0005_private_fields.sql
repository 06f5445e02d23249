-- Private fields: which payload fields a tenant declared private, and the keys of the people they are about.
-- Runs as the owner. Keys stand here only wrapped by a master key that is outside of this database.

-- The one row there is once a tenant has declared something. Every change of what follows takes a higher revision
-- under this row's lock, so revisions are in the order of commits and a node can ask for what is new.
CREATE TABLE scheduler.privacy_state (
    "only" boolean PRIMARY KEY DEFAULT true CONSTRAINT privacy_state_one_row CHECK ("only"),
    revision bigint NOT NULL,
    master_key_id text COLLATE "C" NOT NULL,
    wrapped_secret bytea NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- What a tenant has declared private; no fields any more once it took everything back.
CREATE TABLE scheduler.private_fields (
    tenant_id text COLLATE "C" PRIMARY KEY,
    fields json NOT NULL,
    subject text COLLATE "C",
    revision bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- One row a key; the row of a destroyed key stays without it. ``subject_tag`` is a keyed hash of the subject.
CREATE TABLE scheduler.subject_keys (
    tenant_id text COLLATE "C" NOT NULL,
    key_id text COLLATE "C" NOT NULL,
    subject_tag bytea NOT NULL,
    wrapped_key bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    erased_at timestamptz,
    erased_revision bigint,
    PRIMARY KEY (tenant_id, key_id),
    CONSTRAINT subject_keys_erased CHECK ((wrapped_key IS NULL) = (erased_at IS NOT NULL)),
    CONSTRAINT subject_keys_erased_revision CHECK ((erased_at IS NULL) = (erased_revision IS NULL))
);

CREATE UNIQUE INDEX subject_keys_living ON scheduler.subject_keys (tenant_id, subject_tag) WHERE wrapped_key IS NOT NULL;
CREATE INDEX subject_keys_subject ON scheduler.subject_keys (tenant_id, subject_tag);
CREATE INDEX subject_keys_erased_since ON scheduler.subject_keys (erased_revision) WHERE erased_revision IS NOT NULL;

-- What the chain of a tenant must say of its private fields. ``seq`` is null until it does.
CREATE TABLE scheduler.privacy_records (
    tenant_id text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    action text COLLATE "C" NOT NULL,
    facts json NOT NULL,
    node_id text COLLATE "C" NOT NULL,
    seq bigint,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, revision)
);

CREATE INDEX privacy_records_open ON scheduler.privacy_records (node_id) WHERE seq IS NULL;

-- A key that was destroyed stays destroyed.

CREATE FUNCTION scheduler.refuse_revival() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    RAISE EXCEPTION 'key % of tenant % was erased: it stays erased', OLD.key_id, OLD.tenant_id
        USING ERRCODE = 'restrict_violation';
END
$$;

CREATE TRIGGER erased_for_good BEFORE UPDATE ON scheduler.subject_keys
    FOR EACH ROW WHEN (OLD.wrapped_key IS NULL) EXECUTE FUNCTION scheduler.refuse_revival();

REVOKE ALL ON scheduler.privacy_state, scheduler.private_fields, scheduler.subject_keys, scheduler.privacy_records
    FROM PUBLIC;
REVOKE ALL ON FUNCTION scheduler.refuse_revival() FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE ON
    scheduler.privacy_state, scheduler.private_fields, scheduler.subject_keys, scheduler.privacy_records
    TO tallystick_service;
