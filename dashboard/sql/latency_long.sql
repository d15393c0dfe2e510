-- The same from the minutes: means of their percentiles, by their queries. Objectives are those of the apps.
SELECT date_bin(%(step)s, m.minute, %(start)s) AS time, m.app, sum(m.queries)::bigint AS queries,
       sum(m.p50_ms * m.queries) / nullif(sum(m.queries) FILTER (WHERE m.p50_ms IS NOT NULL), 0) AS p50_ms,
       NULL::double precision AS p95_ms,
       sum(m.p99_ms * m.queries) / nullif(sum(m.queries) FILTER (WHERE m.p99_ms IS NOT NULL), 0) AS p99_ms,
       max(a.latency_ms) AS slo_ms
FROM infaas.slo_by_app_minutely m LEFT JOIN infaas.apps a USING (app)
WHERE m.minute >= %(start)s AND m.minute < %(end)s
GROUP BY 1, 2
ORDER BY 1, 2
