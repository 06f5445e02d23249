-- The index of jobs of each chain, of which snapshots sign the roots (docs/formats/job-index.md). It follows from the log.

-- The leaves of a run in pieces of 256, 72 bytes each. A run leaves once it is merged into one of the next level.
CREATE TABLE scheduler.job_index_piece (
    tenant_id text COLLATE "C" NOT NULL,
    level smallint NOT NULL,
    first_leaf bigint NOT NULL,
    piece integer NOT NULL,
    first_key bytea NOT NULL,
    root bytea NOT NULL,
    leaves bytea NOT NULL,
    PRIMARY KEY (tenant_id, level, first_leaf, piece)
);
ALTER TABLE scheduler.job_index_piece ALTER COLUMN leaves SET STORAGE EXTERNAL;

-- Of entries that left with a prune and are in one block with entries that stay: the keys of their jobs, 32 bytes each.
CREATE TABLE scheduler.job_index_left (
    tenant_id text COLLATE "C" NOT NULL,
    first_leaf bigint NOT NULL,
    keys bytea NOT NULL,
    PRIMARY KEY (tenant_id, first_leaf)
);
ALTER TABLE scheduler.job_index_left ALTER COLUMN keys SET STORAGE EXTERNAL;

REVOKE ALL ON scheduler.job_index_piece, scheduler.job_index_left FROM PUBLIC;
GRANT SELECT, INSERT, DELETE ON scheduler.job_index_piece, scheduler.job_index_left TO tallystick_service;
