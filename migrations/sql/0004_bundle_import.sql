-- How far each import of a set of bundles has come, so that one that was cut short goes on where it was.
CREATE TABLE scheduler.bundle_import (
    set_digest text COLLATE "C" PRIMARY KEY,
    bundles bigint NOT NULL,
    entries bigint NOT NULL,
    -- Head seq of each of its tenants when it began.
    from_seqs json NOT NULL,
    -- Entries, in the order of the merge, that are decided.
    position bigint NOT NULL,
    imported bigint NOT NULL,
    duplicates bigint NOT NULL,
    jobs_changed bigint NOT NULL,
    conflicts json NOT NULL,
    node_id text COLLATE "C" NOT NULL,
    began_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    CONSTRAINT bundle_import_position CHECK (position <= entries AND imported + duplicates = position)
);

GRANT SELECT, INSERT, UPDATE ON scheduler.bundle_import TO tallystick_service;
