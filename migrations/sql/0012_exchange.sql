-- How far the chains of other ledgers were imported, and the newest checkpoint of each that was seen: an earlier one, or
-- another of that size, shows that the peer went back.
CREATE TABLE scheduler.exchange_positions (
    log_origin text COLLATE "C" NOT NULL,
    tenant_id text COLLATE "C" NOT NULL,
    note text COLLATE "C" NOT NULL,
    tree_size bigint NOT NULL,
    imported_seq bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, log_origin),
    CONSTRAINT exchange_positions_order CHECK (0 <= imported_seq AND imported_seq <= tree_size)
);

REVOKE ALL ON scheduler.exchange_positions FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE ON scheduler.exchange_positions TO tallystick_service;
