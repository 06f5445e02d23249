-- What outsiders said of checkpoints: cosignatures of witnesses, time stamps of RFC 3161 authorities. Append only.

-- ``note`` is the checkpoint as this log signed it, and under it this one cosignature.
CREATE TABLE scheduler.checkpoint_cosignature (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id text COLLATE "C" NOT NULL,
    witness text COLLATE "C" NOT NULL,
    tree_size bigint NOT NULL CONSTRAINT checkpoint_cosignature_size CHECK (tree_size >= 1),
    cosigned_at timestamptz NOT NULL,
    note text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT checkpoint_cosignature_once UNIQUE (tenant_id, witness, tree_size, cosigned_at)
);

CREATE INDEX checkpoint_cosignature_size_of ON scheduler.checkpoint_cosignature (tenant_id, tree_size);

-- ``response`` is the TimeStampResp of RFC 3161 as it came; its imprint is the SHA-256 of the bytes of ``note``.
CREATE TABLE scheduler.checkpoint_timestamp (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id text COLLATE "C" NOT NULL,
    authority text COLLATE "C" NOT NULL,
    tree_size bigint NOT NULL CONSTRAINT checkpoint_timestamp_size CHECK (tree_size >= 1),
    generated_at timestamptz NOT NULL,
    note text COLLATE "C" NOT NULL,
    response bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT checkpoint_timestamp_once UNIQUE (tenant_id, authority, tree_size)
);

DO $$
DECLARE
    append_only regclass;
BEGIN
    FOREACH append_only IN ARRAY
        ARRAY['scheduler.checkpoint_cosignature'::regclass, 'scheduler.checkpoint_timestamp'::regclass]
    LOOP
        EXECUTE format('CREATE TRIGGER append_only_rows BEFORE UPDATE OR DELETE ON %s'
            ' FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_change()', append_only);
        EXECUTE format('CREATE TRIGGER append_only_table BEFORE TRUNCATE ON %s'
            ' FOR EACH STATEMENT EXECUTE FUNCTION scheduler.refuse_change()', append_only);
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', append_only);
        EXECUTE format('GRANT SELECT, INSERT ON %s TO tallystick_service', append_only);
    END LOOP;
END
$$;
