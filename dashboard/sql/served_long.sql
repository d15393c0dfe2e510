-- Which variants answered over a long time: as served.sql, without percentiles, for which all rows would have to be sorted.
SELECT app, model, variant, hardware, sum(simulated) > 0 AS simulated, sum(outcomes)::bigint AS queries,
       coalesce(sum(outcomes) FILTER (WHERE outcome = 'ok'), 0)::bigint AS in_time,
       sum(accuracy_sum) / nullif(sum(accuracy_rows), 0) AS accuracy,
       NULL::double precision AS p50_ms, NULL::double precision AS p99_ms,
       1000 * sum(cost) / sum(items) AS cost_per_1000, sum(batch_sum) / nullif(sum(batch_rows), 0) AS mean_batch
FROM infaas.outcomes_between(%(start)s, %(end)s)
WHERE outcome IN ('ok', 'late') AND NOT together AND NOT offline
GROUP BY app, model, variant, hardware
ORDER BY app, queries DESC
