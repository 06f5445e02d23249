-- Receivers of entries. One node at a time delivers to each: the holder, until its time is over by the clock here. The
-- position says what the receiver has confirmed; what is being sent ends at sending_seq, so that it is sent again as it was.
CREATE TABLE scheduler.webhooks (
    webhook_id text COLLATE "C" PRIMARY KEY,
    tenant_id text COLLATE "C" NOT NULL,
    url text COLLATE "C" NOT NULL,
    actions text[] COLLATE "C",
    job text COLLATE "C",
    delivered_seq bigint NOT NULL,
    sending_seq bigint NOT NULL DEFAULT 0,
    delivered_at timestamptz,
    failing_since timestamptz,
    last_error text COLLATE "C",
    stopped_at timestamptz,
    holder text COLLATE "C",
    held_until timestamptz,
    created_by text COLLATE "C",
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT webhooks_seq CHECK (delivered_seq >= 0)
);

-- Entries that a receiver refused while it took others. An entry whose time has come again is sent before all else.
CREATE TABLE scheduler.webhook_dead_letters (
    webhook_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    reason text COLLATE "C" NOT NULL,
    is_again boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (webhook_id, seq)
);

REVOKE ALL ON scheduler.webhooks, scheduler.webhook_dead_letters FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON scheduler.webhooks, scheduler.webhook_dead_letters TO tallystick_service;
