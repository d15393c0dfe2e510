-- What members were asked for, how long they took, and at what cost.
SELECT stage AS member, count(*) AS asked,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late')) AS p99_ms,
       1000 * sum(cost) / nullif(sum(items), 0) AS cost_per_1000
FROM infaas.query_outcomes
WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s AND parent IS NOT NULL AND stage <> ''
GROUP BY 1
ORDER BY 1
