-- States of jobs remember creations that differ from the first (ledger/machines/job_state.py, "others"); those that are there
-- already learn it here, from the log. Jobs that were created once stay as they are.
WITH repeated AS (
    SELECT tenant_id, job_id FROM scheduler.scheduler_log WHERE action = 'ENQUEUE'
     GROUP BY tenant_id, job_id HAVING count(*) > 1
), said AS (
    SELECT l.tenant_id, l.job_id, l.hlc_physical, l.hlc_logical, l.hlc_node, l.payload_digest,
           encode(sha256(convert_to('{"assigned_dcs":' || coalesce(l.payload->'assigned_dcs', '[]')::text
                                    || ',"spec":' || coalesce(l.payload->'spec', '{}')::text || '}', 'UTF8')), 'hex')
               AS digest
      FROM scheduler.scheduler_log l JOIN repeated USING (tenant_id, job_id)
     WHERE l.action = 'ENQUEUE'
), firsts AS (
    SELECT DISTINCT ON (tenant_id, job_id, digest) * FROM said
     ORDER BY tenant_id, job_id, digest, hlc_physical, hlc_logical, hlc_node COLLATE "C", payload_digest COLLATE "C"
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY tenant_id, job_id ORDER BY hlc_physical, hlc_logical,
                                 hlc_node COLLATE "C", payload_digest COLLATE "C") AS number
      FROM firsts
), others AS (
    SELECT tenant_id, job_id,
           '{' || string_agg(to_json(digest)::text || ':[' || hlc_physical || ',' || hlc_logical || ','
                             || to_json(hlc_node)::text || ',' || to_json(payload_digest)::text || ']',
                             ',' ORDER BY digest COLLATE "C") || '}' AS value
      FROM ranked WHERE number BETWEEN 2 AND 17
     GROUP BY tenant_id, job_id
)
UPDATE scheduler.jobs j
   SET state = (SELECT '{' || string_agg(to_json(part.key)::text || ':' || part.value, ',' ORDER BY part.key COLLATE "C")
                           || '}'
                  FROM (SELECT key, value::text FROM json_each(j.state) UNION ALL SELECT 'others', o.value) AS part
               )::json
  FROM others o
 WHERE o.tenant_id = j.tenant_id AND o.job_id = j.job_id;
