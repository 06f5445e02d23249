-- Who may write the WAL of a node that safekeepers keep, too; the epoch decides, this only keeps two from trying at once.
CREATE TABLE scheduler.wal_leases (
    node_id text COLLATE "C" PRIMARY KEY,
    holder text COLLATE "C" NOT NULL,
    run text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL
);

REVOKE ALL ON scheduler.wal_leases FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON scheduler.wal_leases TO tallystick_service;
