-- A snapshot without an envelope is unsigned (chain.sign_snapshots = false).
ALTER TABLE scheduler.batch_snapshot ALTER COLUMN dsse_envelope DROP NOT NULL;
