-- The latest queries that meet all filters; null: any. Parts of queries are left out, and so is offline work. What clients asked wrongly is
-- counted by the second: so many `times`, none of which can be opened.
(
SELECT time, uid::text AS query, id, app, outcome, code, latency_ms, slo_ms, variant, worker, cost, items, simulated, policy, missing, cached,
       NULL::bigint AS times
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND parent IS NULL AND policy IS DISTINCT FROM 'offline'
  AND (%(app)s::text IS NULL OR app = %(app)s)
  AND (%(outcome)s::text IS NULL OR outcome = %(outcome)s)
  AND (%(text)s::text IS NULL OR strpos(lower(concat_ws(' ', uid, id, app, variant, worker, code, policy, context)), lower(%(text)s)) > 0)
ORDER BY time DESC
LIMIT 200
)
UNION ALL
(
SELECT time, NULL, NULL, app, 'mistake', code, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, sum(count)::bigint
FROM infaas.client_errors
WHERE time >= %(start)s AND time < %(end)s
  AND (%(app)s::text IS NULL OR app = %(app)s)
  AND (%(outcome)s::text IS NULL OR %(outcome)s = 'mistake')
  AND (%(text)s::text IS NULL OR strpos(lower(concat_ws(' ', app, code)), lower(%(text)s)) > 0)
GROUP BY time, app, code
ORDER BY time DESC
LIMIT 200
)
ORDER BY time DESC
LIMIT 200
