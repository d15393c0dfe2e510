-- Online queries, how they ended and how long they took, by bucket and app, from the minutes: means of their percentiles, by their
-- queries. Objectives are those of the apps.
SELECT s.*, NULL::double precision AS p95_ms, a.latency_ms AS slo_ms
FROM (
  SELECT date_bin(%(step)s, minute, %(start)s) AS time, app,
         sum(queries)::bigint AS queries,
         sum(queries - late - refused - errors)::bigint AS in_time,
         sum(late)::bigint AS late, sum(refused)::bigint AS refused, sum(errors)::bigint AS errors,
         sum(p50_ms * queries) / nullif(sum(queries) FILTER (WHERE p50_ms IS NOT NULL), 0) AS p50_ms,
         sum(p99_ms * queries) / nullif(sum(queries) FILTER (WHERE p99_ms IS NOT NULL), 0) AS p99_ms
  FROM infaas.slo_by_app_minutely
  WHERE minute >= %(start)s AND minute < %(end)s
  GROUP BY 1, 2
) s LEFT JOIN infaas.apps a USING (app)
ORDER BY 1, 2
