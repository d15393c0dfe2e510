-- Which variants answered over a long time: as served.sql, without percentiles, for which all rows would have to be sorted.
SELECT app, model, variant, hardware, bool_or(simulated) AS simulated, count(*) AS queries,
       count(*) FILTER (WHERE outcome = 'ok') AS in_time,
       avg(accuracy) AS accuracy,
       NULL::double precision AS p50_ms, NULL::double precision AS p99_ms,
       1000 * sum(cost) / sum(items) AS cost_per_1000, avg(batch) AS mean_batch
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome IN ('ok', 'late') AND missing IS NULL AND policy IS DISTINCT FROM 'offline'
GROUP BY app, model, variant, hardware
ORDER BY app, queries DESC
