-- What session tokens are bound with (HMAC-SHA256), the same on all nodes of the ledger; made by the first start.
-- Whoever reads it can make tokens: the service alone may.
CREATE TABLE scheduler.session_secret (
    "only" boolean PRIMARY KEY DEFAULT true CONSTRAINT session_secret_one_row CHECK ("only"),
    secret bytea NOT NULL CONSTRAINT session_secret_length CHECK (length(secret) = 32),
    created_at timestamptz NOT NULL DEFAULT now()
);

REVOKE ALL ON scheduler.session_secret FROM PUBLIC;
GRANT SELECT, INSERT ON scheduler.session_secret TO tallystick_service;
