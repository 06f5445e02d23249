-- What a database has in schema scheduler, as PostgreSQL's catalog says: a line each of relation, kind, name, definition.
-- schema.txt beside this file is the answer of a database that was just migrated (tests/app/test_schema.py). A start asks
-- again, and refuses a database that lacks a line or has another in its place, or that has on one of these tables a
-- trigger, a rule, row security or no WAL (UNLOGGED) where schema.txt has none. By hand:
--   psql "$TALLY_MIGRATE_URL" -XAtf migrations/catalog.sql | diff migrations/schema.txt -
-- A plain index guards nothing: a start does without. What is switched off or not valid is not told. Nothing here waits
-- for a table that somebody keeps locked; PostgreSQL writes out a condition only under a lock of its table, so of checks,
-- of partial indexes and of WHEN it is told that there is one. What an index is OF are the functions, columns and constants
-- of its expressions in the order of PostgreSQL's own text of them, which takes no lock.
WITH relations AS (
    SELECT oid, relname, relispartition, relrowsecurity, relpersistence FROM pg_class
     WHERE relnamespace = to_regnamespace('scheduler') AND relkind IN ('r', 'p') AND relname <> 'alembic_version'
), facts AS (
    SELECT c.relname, 'column' AS kind, a.attname AS name, a.attnum AS place,
           concat_ws(' ', format_type(a.atttypid, a.atttypmod), 'COLLATE ' || nullif(quote_ident(l.collname), '"default"'),
                     CASE a.attidentity WHEN 'a' THEN 'GENERATED ALWAYS AS IDENTITY' END,
                     'DEFAULT ' || pg_get_expr(d.adbin, 0),
                     CASE WHEN a.attnotnull THEN 'NOT NULL' END) AS definition
      FROM relations c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
      LEFT JOIN pg_collation l ON l.oid = a.attcollation
      LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
     WHERE NOT c.relispartition
    UNION ALL
    SELECT c.relname, 'constraint', k.conname, 0,
           CASE k.contype
               WHEN 'c' THEN 'CHECK of ' || (SELECT string_agg(a.attname, ', ' ORDER BY a.attnum) FROM pg_attribute a
                                              WHERE a.attrelid = c.oid AND a.attnum = ANY(k.conkey))
               ELSE pg_get_constraintdef(k.oid) END
      FROM relations c JOIN pg_constraint k ON k.conrelid = c.oid LEFT JOIN pg_index i ON i.indexrelid = k.conindid
     WHERE NOT c.relispartition AND k.contype IN ('p', 'u', 'c') AND k.convalidated AND coalesce(i.indisvalid, true)
    UNION ALL
    SELECT c.relname, CASE WHEN i.indisunique THEN 'unique' ELSE 'index' END, n.relname, 0,
           concat_ws(' ', CASE WHEN i.indnullsnotdistinct THEN 'NULLS NOT DISTINCT' END,
                     (SELECT string_agg(coalesce(a.attname, '(...)'), ', ' ORDER BY key.place)
                        FROM unnest(i.indkey) WITH ORDINALITY AS key(attnum, place)
                        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = key.attnum),
                     'OF ' || (SELECT string_agg(coalesce(part[1], f.pronamespace::regnamespace || '.' || f.proname,
                                                          a.attname, format_type(part[4]::oid, NULL), part[5]),
                                                 ' ' ORDER BY place)
                                 FROM regexp_matches(i.indexprs::text, '{(?!FUNCEXPR|VAR|CONST)(\w+)|:(?:op)?funcid (\d+)'
                                                     '|:varattno (\d+)|:resulttype (\d+)|:constvalue (?:\d+ )?(<>|\[[^]]*\])',
                                                     'g') WITH ORDINALITY AS found(part, place)
                                 LEFT JOIN pg_proc f ON f.oid = part[2]::oid
                                 LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = part[3]::int),
                     CASE WHEN i.indpred IS NOT NULL THEN 'WHERE ...' END)
      FROM relations c JOIN pg_index i ON i.indrelid = c.oid JOIN pg_class n ON n.oid = i.indexrelid
     WHERE NOT c.relispartition AND i.indisvalid AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = n.oid)
    UNION ALL
    SELECT c.relname, 'trigger', quote_ident(t.tgname), 0,
           concat_ws(' ', CASE WHEN t.tgtype & 2 > 0 THEN 'BEFORE' WHEN t.tgtype & 64 > 0 THEN 'INSTEAD' ELSE 'AFTER' END,
                     concat_ws(' OR ', CASE WHEN t.tgtype & 4 > 0 THEN 'INSERT' END,
                               CASE WHEN t.tgtype & 8 > 0 THEN 'DELETE' END,
                               CASE WHEN t.tgtype & 16 > 0 THEN 'UPDATE' END,
                               CASE WHEN t.tgtype & 32 > 0 THEN 'TRUNCATE' END),
                     'OF ' || nullif(t.tgattr::text, ''),
                     CASE WHEN t.tgtype & 1 > 0 THEN 'FOR EACH ROW' ELSE 'FOR EACH STATEMENT' END,
                     CASE WHEN t.tgqual IS NOT NULL THEN 'WHEN ...' END,
                     'EXECUTE ' || p.pronamespace::regnamespace || '.' || p.proname)
      FROM relations c JOIN pg_trigger t ON t.tgrelid = c.oid JOIN pg_proc p ON p.oid = t.tgfoid
     WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A')
    UNION ALL
    SELECT c.relname, 'rule', quote_ident(r.rulename), 0,
           'ON ' || CASE r.ev_type WHEN '1' THEN 'SELECT' WHEN '2' THEN 'UPDATE' WHEN '3' THEN 'INSERT' ELSE 'DELETE' END
      FROM relations c JOIN pg_rewrite r ON r.ev_class = c.oid WHERE r.ev_enabled IN ('O', 'A')
    UNION ALL
    SELECT relname, 'security', 'rows', 0, 'ROW LEVEL SECURITY' FROM relations WHERE relrowsecurity
    UNION ALL
    SELECT relname, 'storage', 'unlogged', 0, 'UNLOGGED' FROM relations WHERE relpersistence <> 'p'
    UNION ALL
    SELECT c.relname, 'partition', p.relname, 0, pg_get_expr(p.relpartbound, 0)
      FROM relations c JOIN pg_inherits i ON i.inhparent = c.oid JOIN pg_class p ON p.oid = i.inhrelid
    UNION ALL
    SELECT 'scheduler', 'function', f.proname, 0,
           concat_ws(' ', 'LANGUAGE ' || l.lanname, 'SET ' || array_to_string(f.proconfig, ', '),
                     'AS ' || btrim(regexp_replace(f.prosrc, '\s+', ' ', 'g')))
      FROM pg_proc f JOIN pg_language l ON l.oid = f.prolang WHERE f.pronamespace = to_regnamespace('scheduler')
)
SELECT format('%-22I %-10s %-30s %s', relname, kind, name, definition) AS fact
  FROM facts ORDER BY relname COLLATE "C", kind, place, name COLLATE "C";
