-- Queries that were not answered in time: how many, of which app, for which reason.
SELECT app, CASE outcome WHEN 'late' THEN 'late' ELSE coalesce(code, outcome) END AS reason, outcome, sum(outcomes)::bigint AS queries,
       sum(simulated)::bigint AS simulated, min(first) AS first, max(last) AS last
FROM infaas.outcomes_between(%(start)s, %(end)s)
WHERE outcome NOT IN ('ok', 'default', 'cancelled') AND NOT part AND NOT offline
GROUP BY 1, 2, 3
ORDER BY queries DESC
