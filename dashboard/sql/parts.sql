-- What members were asked for, how long they took, and at what cost; for buckets of hours from the hours, without percentiles.
SELECT stage AS member, count(*) AS asked,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late')) AS p99_ms,
       1000 * sum(cost) / nullif(sum(items), 0) AS cost_per_1000
FROM infaas.query_outcomes
WHERE %(step)s < interval '1 hour' AND app = %(app)s AND time >= %(start)s AND time < %(end)s AND parent IS NOT NULL AND stage <> ''
GROUP BY 1
UNION ALL
SELECT stage, sum(outcomes)::bigint, NULL, NULL, 1000 * sum(cost) / nullif(sum(items), 0)
FROM infaas.outcomes_between(%(start)s, %(end)s)
WHERE %(step)s >= interval '1 hour' AND app = %(app)s AND part AND stage <> ''
GROUP BY 1
ORDER BY 1
