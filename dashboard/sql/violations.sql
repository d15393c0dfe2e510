-- Queries that were not answered in time: how many, of which app, for which reason.
SELECT app, CASE outcome WHEN 'late' THEN 'late' ELSE coalesce(code, outcome) END AS reason, outcome, count(*) AS queries,
       count(*) FILTER (WHERE simulated) AS simulated, min(time) AS first, max(time) AS last
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome NOT IN ('ok', 'default', 'cancelled') AND parent IS NULL
  AND policy IS DISTINCT FROM 'offline'
GROUP BY 1, 2, 3
ORDER BY queries DESC
