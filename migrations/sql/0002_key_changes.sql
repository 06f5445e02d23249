-- Which keys sign now, and why one was revoked. What counts is in the chain of _system; these rows are its index.

ALTER TABLE scheduler.signing_keys
    ADD COLUMN signs_snapshots boolean NOT NULL DEFAULT false,
    ADD COLUMN signs_checkpoints boolean NOT NULL DEFAULT false,
    ADD COLUMN revocation_reason text;
