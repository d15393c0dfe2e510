-- How far the models that answered together agreed, and how many were missing, by bucket; for buckets of hours from the hours.
SELECT date_bin(%(step)s, time, %(start)s) AS time, sum(queries)::bigint AS queries, sum(sure) / nullif(sum(told), 0) AS confidence,
       sum(incomplete)::bigint AS incomplete, coalesce(sum(queries) FILTER (WHERE outcome = 'default'), 0)::bigint AS defaults
FROM (
  SELECT time, outcome, 1 AS queries, confidence AS sure, (confidence IS NOT NULL)::int AS told, (missing > 0)::int AS incomplete
  FROM infaas.query_outcomes
  WHERE %(step)s < interval '1 hour' AND app = %(app)s AND time >= %(start)s AND time < %(end)s AND missing IS NOT NULL AND outcome <> 'cancelled'
  UNION ALL
  SELECT hour, outcome, outcomes, confidence_sum, confidence_rows, incomplete FROM infaas.outcomes_between(%(start)s, %(end)s)
  WHERE %(step)s >= interval '1 hour' AND app = %(app)s AND together AND outcome <> 'cancelled'
) rows
GROUP BY 1
ORDER BY 1
