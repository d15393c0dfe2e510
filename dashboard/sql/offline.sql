-- Items that offline jobs had computed, by bucket and app; for buckets of hours from the hours.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app, sum(items)::bigint AS items
FROM (
  SELECT time, app, items FROM infaas.query_outcomes
  WHERE %(step)s < interval '1 hour' AND time >= %(start)s AND time < %(end)s AND policy = 'offline' AND payer IS NULL AND outcome IN ('ok', 'late')
  UNION ALL
  SELECT hour, app, items FROM infaas.outcomes_between(%(start)s, %(end)s)
  WHERE %(step)s >= interval '1 hour' AND offline AND payer IS NULL AND outcome IN ('ok', 'late')
) rows
GROUP BY 1, 2
ORDER BY 1, 2
