-- The latest queries that meet all filters; null: any. Parts of queries are left out, and so is offline work.
SELECT time, uid::text AS query, id, app, outcome, code, latency_ms, slo_ms, variant, worker, cost, items, simulated, policy, missing, cached
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND parent IS NULL AND policy IS DISTINCT FROM 'offline'
  AND (%(app)s::text IS NULL OR app = %(app)s)
  AND (%(outcome)s::text IS NULL OR outcome = %(outcome)s)
  AND (%(text)s::text IS NULL OR strpos(lower(concat_ws(' ', uid, id, app, variant, worker, code, policy, context)), lower(%(text)s)) > 0)
ORDER BY time DESC
LIMIT 200
