-- Latencies of answered queries by bucket and app, beside the strictest objective that one of them came with.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app, count(*) AS queries,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) AS p50_ms,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY latency_ms) AS p95_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) AS p99_ms,
       min(slo_ms) AS slo_ms
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome IN ('ok', 'late', 'default') AND parent IS NULL AND policy IS DISTINCT FROM 'offline'
  AND latency_ms IS NOT NULL
GROUP BY 1, 2
ORDER BY 1, 2
