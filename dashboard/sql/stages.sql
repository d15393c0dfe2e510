-- How often the vertices of a pipeline were visited, by its queries, how long they took, and at what cost.
SELECT part.stage AS vertex, part.app, count(*) AS visits,
       count(*) FILTER (WHERE part.outcome NOT IN ('ok', 'late', 'cancelled')) AS failed,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY part.latency_ms) FILTER (WHERE part.outcome IN ('ok', 'late')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY part.latency_ms) FILTER (WHERE part.outcome IN ('ok', 'late')) AS p99_ms,
       avg(part.batch) AS mean_batch, avg(part.accuracy) AS accuracy,
       1000 * sum(part.cost) / nullif(sum(part.items), 0) AS cost_per_1000
FROM infaas.query_outcomes query JOIN infaas.query_outcomes part ON part.parent = query.uid
WHERE query.app = %(app)s AND query.time >= %(start)s AND query.time < %(end)s AND part.time >= %(start)s
GROUP BY 1, 2
ORDER BY 1, 2
