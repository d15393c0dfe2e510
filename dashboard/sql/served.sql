-- Which variants answered, for whom, how well and at what price; parts of queries too, and not what was made of them.
SELECT app, model, variant, hardware, bool_or(simulated) AS simulated, count(*) AS queries,
       count(*) FILTER (WHERE outcome = 'ok') AS in_time,
       avg(accuracy) AS accuracy,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) AS p99_ms,
       1000 * sum(cost) / sum(items) AS cost_per_1000, avg(batch) AS mean_batch
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome IN ('ok', 'late') AND missing IS NULL AND policy IS DISTINCT FROM 'offline'
GROUP BY app, model, variant, hardware
ORDER BY app, queries DESC
