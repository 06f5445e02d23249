-- What a receiver is sent each entry as, and the entry from which an administrator has it sent all again: the node that
-- delivers goes back there and clears it, so that no answer to what it sent before moves the position on.
ALTER TABLE scheduler.webhooks
    ADD COLUMN format text COLLATE "C" NOT NULL DEFAULT 'standard',
    ADD COLUMN replay_seq bigint,
    ADD CONSTRAINT webhooks_replay CHECK (replay_seq > 0);
