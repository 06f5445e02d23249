-- Verification with psql alone (docs/formats/sql.md). Every function here only reads, and belongs to the owner of the
-- schema, so a role that may write rows cannot change it. A caller that trusts no function of the database pastes
-- docs/formats/verify.sql, which makes the same functions in the schema of the session.

DO $$ BEGIN
    IF to_regprocedure('scheduler.tree_append(bytea[], bigint, bytea[])') IS NOT NULL THEN
        DROP FUNCTION scheduler.tree_append(bytea[], bigint, bytea[]);
    END IF;
END $$;

-- The link of an entry of version 2 (docs/formats/chain-link.md). link_prefix is the header, tenant and length of seq;
-- prev and digest are 64 hex digits, prev null for the first entry. PostgreSQL writes the body into the query of the caller
-- only while it is declared no stricter than concat, which is STABLE; a call an entry takes a third of all time.
CREATE OR REPLACE FUNCTION scheduler.link_of(
    link_prefix bytea, seq bigint, t_hlc text, job_id text, action text, prev text, digest text, origin text
) RETURNS bytea
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT sha256(
        link_prefix || int8send(seq)
        || int4send(octet_length(t_hlc)) || convert_to(t_hlc, 'UTF8')
        || int4send(octet_length(job_id)) || convert_to(job_id, 'UTF8')
        || int4send(octet_length(action)) || convert_to(action, 'UTF8')
        || decode(CASE WHEN prev IS NULL THEN '00000000' ELSE concat('00000020', prev) END, 'hex')
        || decode(concat('00000020', digest), 'hex')
        || CASE WHEN origin IS NULL THEN int4send(0)
                ELSE int4send(octet_length(origin)) || convert_to(origin, 'UTF8') END)
$$;

-- What every link of a tenant's chain hashes first.
CREATE OR REPLACE FUNCTION scheduler.link_prefix(tenant text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog
AS $$
    SELECT convert_to(E'tallystick.chain-link.v2\n', 'UTF8')
        || int4send(octet_length(tenant)) || convert_to(tenant, 'UTF8') || int4send(8)
$$;

-- How a row of the log contradicts itself, or the link of the entry before it: the kind of its first break, else null.
CREATE OR REPLACE FUNCTION scheduler.entry_fault(
    e scheduler.scheduler_log, prev text, is_prev_known boolean, may_be_v1 boolean
) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog
AS $$
    SELECT CASE
        WHEN e.payload IS NULL OR e.payload_digest IS NULL THEN 'payload-digest'
        WHEN e.t_hlc IS NULL OR e.hlc_physical IS NULL OR e.hlc_logical IS NULL OR e.hlc_node IS NULL THEN 'hlc-columns'
        WHEN e.job_id IS NULL OR e.action IS NULL OR e.link_version IS NULL OR e.chain_link IS NULL THEN 'link'
        WHEN e.payload_digest <> encode(sha256(convert_to(e.payload::text, 'UTF8')), 'hex') THEN 'payload-digest'
        WHEN e.t_hlc <> concat(e.hlc_physical, ':', e.hlc_logical, ':', e.hlc_node) THEN 'hlc-columns'
        WHEN is_prev_known AND e.prev_chain_link IS DISTINCT FROM prev THEN 'prev-link'
        WHEN e.link_version = 1 THEN CASE
            WHEN NOT may_be_v1 OR e.chain_link <> encode(sha256(convert_to(concat(
                e.t_hlc, e.job_id, e.action, coalesce(e.prev_chain_link, 'genesis'), e.payload_digest), 'UTF8')), 'hex')
            THEN 'link' END
        WHEN e.link_version <> 2 OR e.prev_chain_link !~ '^[0-9a-f]{64}$' THEN 'link'
        WHEN e.chain_link <> encode(
            scheduler.link_of(scheduler.link_prefix(e.tenant_id), e.seq, e.t_hlc, e.job_id, e.action, e.prev_chain_link,
                              e.payload_digest, e.origin::text), 'hex') THEN 'link'
        END
$$;

-- The right edge of a Merkle tree (RFC 9162) of tree_size leaves with these leaf hashes, of 32 bytes each, appended.
-- Member k + 1 is the root of the perfect subtree of 2^k leaves, null without one.
CREATE OR REPLACE FUNCTION scheduler.tree_append(edge bytea[], tree_size bigint, leaves bytea) RETURNS bytea[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog
AS $$
DECLARE
    nodes bytea := leaves;
    level integer := 0;
BEGIN
    WHILE nodes <> '' LOOP
        IF (tree_size >> level) & 1 = 1 THEN
            nodes := edge[level + 1] || nodes;
        END IF;
        edge[level + 1] := CASE WHEN length(nodes) % 64 = 32 THEN substring(nodes FROM length(nodes) - 31) END;
        SELECT string_agg(sha256('\x01'::bytea || substring(nodes FROM at FOR 64)), '') INTO nodes
          FROM generate_series(1, length(nodes) - 63, 64) AS pairs(at);
        level := level + 1;
    END LOOP;
    RETURN edge;
END
$$;

-- The root of the tree with this right edge, in hex; null of an empty one.
CREATE OR REPLACE FUNCTION scheduler.tree_root(edge bytea[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog
AS $$
DECLARE
    root bytea;
    node bytea;
BEGIN
    FOREACH node IN ARRAY edge LOOP
        root := CASE WHEN root IS NULL OR node IS NULL THEN coalesce(node, root)
                     ELSE sha256('\x01'::bytea || node || root) END;
    END LOOP;
    RETURN encode(root, 'hex');
END
$$;

-- The break that comes first: the one of lowest seq, then of the first kind in the order of docs/formats/chain-link.md.
CREATE OR REPLACE FUNCTION scheduler.first_break(known jsonb, seq bigint, kind text, detail text) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog
AS $$
    SELECT CASE
        WHEN known IS NULL
             OR (seq, array_position(kinds, kind))
                < ((known ->> 'seq')::bigint, array_position(kinds, known ->> 'kind'))
        THEN jsonb_build_object('seq', seq, 'kind', kind, 'detail', detail) ELSE known END
      FROM (VALUES (ARRAY['gap', 'duplicate-seq', 'payload-digest', 'hlc-columns', 'prev-link', 'link', 'malformed',
                          'head', 'tail-truncated', 'snapshot-root', 'snapshot-signature', 'snapshot-chain', 'tree']))
           AS all_kinds(kinds)
$$;

-- What left a chain with a prune, by its newest PRUNED entry that names the entry about retention before it; no row if
-- nothing did. peaks are the perfect subtrees of the tree at to_seq, the largest first (docs/formats/retention.md).
CREATE OR REPLACE FUNCTION scheduler.chain_floor(tenant text)
RETURNS TABLE (to_seq bigint, chain_link text, snapshot text, peaks bytea[])
LANGUAGE sql STABLE
SET search_path = pg_catalog
AS $$
    SELECT p.to_seq, p.payload ->> 'chain_link', p.payload ->> 'snapshot',
           ARRAY(SELECT decode(hash, 'hex') FROM json_array_elements_text(p.payload -> 'compact_range') AS c(hash))
      FROM (SELECT l.seq, l.payload, l.payload -> 'after' ->> 'seq' AS after_seq,
                   CASE WHEN json_typeof(l.payload -> 'to_seq') = 'number'
                             AND json_typeof(l.payload -> 'after' -> 'seq') = 'number'
                             AND json_typeof(l.payload -> 'compact_range') = 'array'
                        THEN (l.payload ->> 'to_seq')::bigint END AS to_seq
              FROM scheduler.scheduler_log AS l
             WHERE l.tenant_id = tenant AND tenant <> '_system' AND l.job_id = 'retention policy'
               AND l.action = 'PRUNED' AND l.origin IS NULL) AS p
     WHERE p.to_seq < p.seq
       AND NOT EXISTS (SELECT FROM scheduler.scheduler_log AS b
                        WHERE b.tenant_id = tenant AND b.job_id = 'retention policy'
                          AND b.seq > greatest(p.after_seq::numeric, p.to_seq) AND b.seq < p.seq)
     ORDER BY p.seq DESC LIMIT 1
$$;

-- Each snapshot of a chain above a floor. claim is the predicate of its envelope, null of an unsigned one and of an
-- envelope that is no snapshot's; said is its row as a claim; digest is what the snapshot after it names.
CREATE OR REPLACE FUNCTION scheduler.opened_snapshots(tenant text, first_seq bigint)
RETURNS TABLE (from_seq bigint, to_seq bigint, is_signed boolean, claim jsonb, said jsonb, digest text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog
AS $$
DECLARE
    stored record;
    payload bytea;
BEGIN
    FOR stored IN SELECT s.* FROM scheduler.batch_snapshot AS s
                   WHERE s.tenant_id = tenant AND (s.from_seq >= first_seq OR s.from_seq IS NULL OR first_seq = 1)
                   ORDER BY s.from_seq, s.to_seq, s.id LOOP
        from_seq := stored.from_seq;
        to_seq := stored.to_seq;
        is_signed := stored.dsse_envelope IS NOT NULL;
        said := jsonb_build_object(
            'entry_count', stored.entry_count, 'from_chain_link', stored.from_chain_link, 'from_seq', from_seq,
            'merkle_root', stored.merkle_root, 'snapshot_hlc', stored.snapshot_hlc,
            'to_chain_link', stored.to_chain_link, 'to_seq', to_seq);
        claim := NULL;
        digest := NULL;
        IF NOT is_signed THEN  -- The digest is that of the canonical JSON of the row.
            SELECT encode(sha256(convert_to('{' || string_agg(
                       format('"%s":%s', c.name, c.value), ',' ORDER BY c.name COLLATE "C") || '}', 'UTF8')), 'hex')
              INTO digest FROM jsonb_each(said) AS c(name, value);
        ELSE
            BEGIN
                payload := decode(stored.dsse_envelope ->> 'payload', 'base64');
                claim := convert_from(payload, 'UTF8')::jsonb -> 'predicate';
                PERFORM (claim ->> 'from_seq')::bigint, (claim ->> 'to_seq')::bigint;
                digest := CASE WHEN claim IS NOT NULL THEN encode(sha256(payload), 'hex') END;
            EXCEPTION WHEN data_exception OR feature_not_supported THEN
                claim := NULL;
            END;
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- The snapshots of a chain from first_seq on: the first break among them, apart from the entries; what each of those
-- that are compared with their entries says of them, in order; and the highest seq that any covers.
CREATE OR REPLACE FUNCTION scheduler.snapshot_ranges(tenant text, first_seq bigint, previous text)
RETURNS TABLE (first_break jsonb, ranges jsonb[], highest_seq bigint)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog
AS $$
DECLARE
    s record;
    from_is bigint;
    to_is bigint;
    expected_from bigint := first_seq;
    covered_to bigint := first_seq - 1;
    is_previous_known boolean := true;
BEGIN
    ranges := '{}';
    highest_seq := 0;
    FOR s IN SELECT * FROM scheduler.opened_snapshots(tenant, first_seq) LOOP
        -- 1. It has a range and, if it is signed, a claim.
        IF s.from_seq IS NULL OR s.to_seq IS NULL THEN
            first_break := scheduler.first_break(
                first_break, coalesce(s.to_seq, s.from_seq, 1), 'snapshot-root', 'a snapshot has no range');
            CONTINUE;
        END IF;
        IF s.is_signed AND s.claim IS NULL THEN
            first_break := scheduler.first_break(
                first_break, s.to_seq, 'snapshot-signature', format('the snapshot to %s is malformed', s.to_seq));
        END IF;
        highest_seq := greatest(highest_seq, s.to_seq);
        from_is := coalesce((s.claim ->> 'from_seq')::bigint, s.from_seq);
        to_is := coalesce((s.claim ->> 'to_seq')::bigint, s.to_seq);
        -- 2. It follows the one before it.
        IF from_is <> expected_from THEN
            first_break := scheduler.first_break(
                first_break, least(expected_from, from_is), 'snapshot-chain',
                format('a snapshot begins at %s where one from %s must follow', from_is, expected_from));
        ELSIF is_previous_known AND s.claim ->> 'previous_snapshot' IS DISTINCT FROM previous
              AND s.claim IS NOT NULL THEN
            first_break := scheduler.first_break(
                first_break, from_is, 'snapshot-chain',
                format('the snapshot from %s names another one before it than the stored one', from_is));
        END IF;
        expected_from := greatest(to_is + 1, expected_from);
        previous := s.digest;
        is_previous_known := s.digest IS NOT NULL;
        -- 3. Its row says what was signed.
        IF s.claim IS NOT NULL
           AND (s.claim ->> 'tenant_id' IS DISTINCT FROM tenant
                OR EXISTS (SELECT FROM jsonb_each(s.said) AS c WHERE s.claim -> c.key IS DISTINCT FROM c.value)) THEN
            first_break := scheduler.first_break(
                first_break, to_is, 'snapshot-root',
                format('the snapshot of %s..%s is not stored as it was signed', from_is, to_is));
        END IF;
        -- 4. It is compared with its entries if it covers some that none before it does.
        IF greatest(s.from_seq, covered_to + 1) = from_is AND from_is <= to_is THEN
            covered_to := to_is;
            IF (from_is, to_is) = (s.from_seq, s.to_seq) THEN
                ranges := ranges || coalesce(s.claim, s.said);
            END IF;
        END IF;
    END LOOP;
    RETURN NEXT;
END
$$;

-- The verdict on a tenant's chain: links, payload digests, HLC columns, head, snapshots and root of the stored tree. No
-- row for a tenant of which there is nothing. Compare tree_size and tree_root with a checkpoint held elsewhere.
CREATE OR REPLACE FUNCTION scheduler.verify_chain(tenant text)
RETURNS TABLE (valid boolean, first_break jsonb, verified_from_seq bigint, to_seq bigint, entries_checked bigint,
               head_link text, tree_size bigint, tree_root text, not_checked text[])
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog
SET jit = off -- Compiling a query takes longer than a block of entries.
AS $$
DECLARE
    block_entries CONSTANT bigint := 4096;
    empty_root CONSTANT text := encode(sha256(''), 'hex');
    prefix CONSTANT bytea := scheduler.link_prefix(tenant);
    floor record;
    peak integer := 0;
    head record;
    stored_tree record;
    last record;
    found jsonb;                -- the first break so far
    broken_at bigint;           -- the lowest seq at which the chain itself breaks, which explains differences above it
    -- entries
    first_seq bigint := 1;
    next_seq bigint;            -- the seq that must come next
    read_seq bigint;            -- the seq to read from, above next_seq where entries are missing
    end_seq bigint;
    is_link_known boolean := true;
    may_be_v1 boolean := true;
    block record;
    is_in_order boolean;
    e scheduler.scheduler_log;
    fault text;
    last_hlc text;
    -- the tree over all entries up to the first missing one, and that over the entries of a snapshot
    leaves bytea;               -- 32 bytes for each entry of the block
    edge bytea[] := '{}';
    is_tree_whole boolean := true;
    ranges jsonb[];
    highest_seq bigint;
    of_range jsonb;
    current_range integer := 1;
    range_from bigint;
    range_to bigint;
    range_link text;
    range_edge bytea[];
    range_count bigint;
BEGIN
    -- 1. The ends of the chain.
    SELECT * INTO floor FROM scheduler.chain_floor(tenant);
    IF floor.to_seq IS NOT NULL THEN
        first_seq := floor.to_seq + 1;
        head_link := floor.chain_link;
        may_be_v1 := false;
        FOR level IN REVERSE 62..0 LOOP
            IF (floor.to_seq >> level) & 1 = 1 THEN
                peak := peak + 1;
                edge[level + 1] := floor.peaks[peak];
            END IF;
        END LOOP;
    END IF;
    SELECT h.head_seq AS seq, h.head_chain_link AS link, h.head_hlc AS hlc
      INTO head FROM scheduler.chain_heads AS h WHERE h.tenant_id = tenant;
    SELECT m.tree_size AS size, m.root_hash AS root INTO stored_tree
      FROM scheduler.merkle_head AS m WHERE m.tenant_id = tenant;
    SELECT l.seq, l.chain_link AS link, l.t_hlc AS hlc INTO last FROM scheduler.scheduler_log AS l
     WHERE l.tenant_id = tenant AND (l.seq >= first_seq OR first_seq = 1) ORDER BY l.seq DESC, l.ctid DESC LIMIT 1;
    SELECT s.first_break, s.ranges, s.highest_seq INTO found, ranges, highest_seq
      FROM scheduler.snapshot_ranges(tenant, first_seq, floor.snapshot) AS s;
    IF last.seq IS NULL AND head IS NULL AND stored_tree IS NULL AND found IS NULL AND highest_seq = 0 THEN
        RETURN;
    END IF;
    last.seq := coalesce(last.seq, 0);

    -- 2. Entries, in blocks that end where a tree is compared. One query checks a block in order, else row after row.
    entries_checked := 0;
    next_seq := first_seq;
    read_seq := first_seq;
    IF first_seq = 1
       AND EXISTS (SELECT FROM scheduler.scheduler_log AS l WHERE l.tenant_id = tenant AND l.seq < 1) THEN
        read_seq := -9223372036854775808;
    END IF;
    WHILE read_seq <= last.seq LOOP
        of_range := ranges[current_range];
        range_from := of_range ->> 'from_seq';
        range_to := of_range ->> 'to_seq';
        IF range_to < read_seq THEN
            current_range := current_range + 1;
            CONTINUE;
        END IF;
        IF range_from = read_seq THEN
            range_edge := '{}';
            range_count := 0;
        END IF;
        end_seq := least(last.seq, greatest(read_seq, first_seq) + block_entries - 1,
                         CASE WHEN range_from > read_seq THEN range_from - 1 ELSE range_to END,
                         CASE WHEN stored_tree.size >= read_seq THEN stored_tree.size END);
        is_in_order := false;
        IF is_link_known AND read_seq = next_seq THEN
            BEGIN
                SELECT count(*) AS entries, count(*) FILTER (WHERE b.is_right) AS right_entries,
                       string_agg(b.leaf, '') AS leaves,
                       max(b.chain_link) FILTER (WHERE b.seq = next_seq) AS first_link,
                       max(b.chain_link) FILTER (WHERE b.seq = end_seq) AS last_link,
                       max(b.t_hlc) FILTER (WHERE b.seq = end_seq) AS last_hlc
                  INTO block
                  FROM (SELECT l.seq, l.t_hlc, l.chain_link,
                               sha256('\x00'::bytea || decode(l.chain_link, 'hex')) AS leaf,
                               l.link_version = 2
                               AND l.seq = next_seq - 1 + row_number() OVER (ORDER BY l.seq)
                               AND l.payload_digest = encode(sha256(convert_to(l.payload::text, 'UTF8')), 'hex')
                               AND l.t_hlc = concat(l.hlc_physical, ':', l.hlc_logical, ':', l.hlc_node)
                               AND l.prev_chain_link
                                   IS NOT DISTINCT FROM lag(l.chain_link, 1, head_link) OVER (ORDER BY l.seq)
                               AND l.chain_link = encode(scheduler.link_of(
                                   prefix, l.seq, l.t_hlc, l.job_id, l.action, l.prev_chain_link, l.payload_digest,
                                   l.origin::text), 'hex') AS is_right
                          FROM scheduler.scheduler_log AS l
                         WHERE l.tenant_id = tenant AND l.seq >= next_seq AND l.seq <= end_seq
                         ORDER BY l.seq) AS b;
                is_in_order := (block.entries, block.right_entries)
                    = (end_seq - next_seq + 1, end_seq - next_seq + 1);
            EXCEPTION WHEN data_exception THEN
                NULL;  -- A link or digest is not hex.
            END;
        END IF;
        IF is_in_order THEN
            entries_checked := entries_checked + block.entries;
            leaves := block.leaves;
            head_link := block.last_link;
            last_hlc := block.last_hlc;
            range_link := CASE WHEN range_count = 0 THEN block.first_link ELSE range_link END;
            may_be_v1 := false;
            next_seq := end_seq + 1;
        ELSE
            leaves := '';
            FOR e IN SELECT l.* FROM scheduler.scheduler_log AS l
                      WHERE l.tenant_id = tenant AND l.seq >= read_seq AND l.seq <= end_seq
                      ORDER BY l.seq, l.ctid LOOP
                entries_checked := entries_checked + 1;
                IF e.seq < next_seq THEN
                    found := scheduler.first_break(
                        found, e.seq, 'duplicate-seq', format('another entry stands at seq %s', e.seq));
                    broken_at := least(broken_at, e.seq + 1);
                    CONTINUE;
                ELSIF e.seq > next_seq THEN
                    found := scheduler.first_break(
                        found, next_seq, 'gap', format('after seq %s comes %s', next_seq - 1, e.seq));
                    broken_at := least(broken_at, next_seq);
                    is_link_known := false;
                    is_tree_whole := false;
                END IF;
                fault := scheduler.entry_fault(e, head_link, is_link_known, may_be_v1);
                IF fault IS NOT NULL THEN
                    found := scheduler.first_break(
                        found, e.seq, fault, format('seq %s is not as it was linked', e.seq));
                END IF;
                IF fault IN ('prev-link', 'link') THEN
                    broken_at := least(broken_at, e.seq);
                END IF;
                leaves := leaves || sha256('\x00'::bytea || CASE WHEN e.chain_link ~ '^[0-9a-f]{64}$'
                                                                 THEN decode(e.chain_link, 'hex') ELSE '' END);
                head_link := e.chain_link;
                last_hlc := e.t_hlc;
                range_link := CASE WHEN e.seq = range_from THEN e.chain_link ELSE range_link END;
                is_link_known := true;
                may_be_v1 := may_be_v1 AND e.link_version IS NOT DISTINCT FROM 1;
                next_seq := e.seq + 1;
            END LOOP;
        END IF;
        -- 3. The trees, as far as no entry is missing.
        IF is_tree_whole THEN
            edge := scheduler.tree_append(edge, next_seq - 1 - length(leaves) / 32, leaves);
        END IF;
        range_edge := scheduler.tree_append(range_edge, range_count, leaves);
        range_count := range_count + length(leaves) / 32;
        IF range_to = end_seq AND range_count = range_to - range_from + 1 AND coalesce(broken_at > end_seq, true)
           AND ((of_range ->> 'from_chain_link', of_range ->> 'to_chain_link', of_range ->> 'snapshot_hlc',
                 of_range ->> 'entry_count', of_range ->> 'merkle_root')
                IS DISTINCT FROM (range_link, head_link, last_hlc, range_count::text, scheduler.tree_root(range_edge))
                OR is_tree_whole AND of_range ->> 'tree_root' <> scheduler.tree_root(edge)) THEN
            found := scheduler.first_break(
                found, end_seq, 'snapshot-root',
                format('the snapshot of %s..%s is not that of the entries', range_from, range_to));
        END IF;
        IF stored_tree.size = end_seq AND is_tree_whole AND next_seq = end_seq + 1
           AND coalesce(broken_at > end_seq, true) AND stored_tree.root IS DISTINCT FROM scheduler.tree_root(edge) THEN
            found := scheduler.first_break(found, end_seq, 'tree', 'the stored root is not that of the entries');
        END IF;
        range_edge := CASE WHEN range_to > end_seq THEN range_edge END;
        -- 4. The next block; where nothing was found, it begins with the next entry.
        read_seq := end_seq + 1;
        IF leaves = '' AND end_seq < last.seq AND end_seq >= first_seq THEN
            read_seq := (SELECT min(l.seq) FROM scheduler.scheduler_log AS l
                          WHERE l.tenant_id = tenant AND l.seq > end_seq);
        END IF;
    END LOOP;

    -- 5. The stored tree and the head.
    IF NOT (stored_tree IS NULL) AND coalesce(stored_tree.size < 0, true) THEN
        found := scheduler.first_break(
            found, greatest(last.seq, 1), 'tree', format('the stored tree has size %s', stored_tree.size));
    ELSIF stored_tree.size = 0 AND stored_tree.root IS DISTINCT FROM empty_root THEN
        found := scheduler.first_break(found, 1, 'tree', 'the stored root is not that of a tree without entries');
    END IF;
    IF greatest(highest_seq, stored_tree.size, head.seq) > last.seq THEN
        found := scheduler.first_break(
            found, last.seq + 1, 'tail-truncated', format('entries from seq %s on are missing', last.seq + 1));
    END IF;
    IF NOT (head IS NULL) AND head.seq IS NULL OR last.seq > 0 AND coalesce(head.seq < last.seq, true) THEN
        found := scheduler.first_break(
            found, last.seq, 'head', 'the head is missing, or stands before the last entry');
    ELSIF head.seq = last.seq AND (head.link, head.hlc) IS DISTINCT FROM (last.link, last.hlc) THEN
        found := scheduler.first_break(found, last.seq, 'head', 'the head does not name the last entry');
    END IF;

    valid := found IS NULL;
    first_break := found;
    verified_from_seq := first_seq;
    to_seq := next_seq - 1;
    tree_size := CASE WHEN is_tree_whole THEN to_seq END;
    tree_root := CASE WHEN is_tree_whole THEN coalesce(scheduler.tree_root(edge), empty_root) END;
    not_checked := ARRAY['signatures', 'forms of payloads', 'tiles', 'job table', 'commitments', 'checkpoints'];
    RETURN NEXT;
END
$$;

-- One entry: whether it agrees with itself and with the entry before it, and the snapshot that covers it.
CREATE OR REPLACE FUNCTION scheduler.verify_entry(tenant text, entry_seq bigint)
RETURNS TABLE (valid boolean, fault text, t_hlc text, job_id text, action text, chain_link text,
               snapshot_from bigint, snapshot_to bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog
AS $$
    SELECT judged.fault IS NULL, judged.fault, e.t_hlc, e.job_id, e.action, e.chain_link, s.from_seq, s.to_seq
      FROM scheduler.scheduler_log AS e
      LEFT JOIN scheduler.scheduler_log AS p ON p.tenant_id = tenant AND p.seq = entry_seq - 1
     CROSS JOIN LATERAL (
        SELECT scheduler.entry_fault(
            e, p.chain_link, entry_seq = 1 OR p.seq IS NOT NULL, coalesce(p.link_version = 1, true)) AS fault) AS judged
      LEFT JOIN scheduler.batch_snapshot AS s ON s.tenant_id = tenant AND entry_seq BETWEEN s.from_seq AND s.to_seq
     WHERE e.tenant_id = tenant AND e.seq = entry_seq
$$;

-- All entries of a job in chain order, each with its fault as verify_entry says it.
CREATE OR REPLACE FUNCTION scheduler.job_history(tenant text, job text)
RETURNS TABLE (seq bigint, at timestamptz, action text, actor text, payload json, fault text)
LANGUAGE sql STABLE
SET search_path = pg_catalog
AS $$
    SELECT e.seq, to_timestamp(e.hlc_physical / 1000.0), e.action, e.payload ->> 'actor', e.payload, v.fault
      FROM scheduler.scheduler_log AS e CROSS JOIN LATERAL scheduler.verify_entry(tenant, e.seq) AS v
     WHERE e.tenant_id = tenant AND e.job_id = job
     ORDER BY e.seq
$$;
