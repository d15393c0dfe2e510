-- What a pipeline costs, by bucket: the instances that are kept for it, and what its queries were charged.
SELECT date_bin(%(step)s, time, %(start)s) AS time, sum(kept) AS kept, sum(charged) AS charged
FROM (
  SELECT time, cost AS kept, 0 AS charged FROM infaas.cost_events
  WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s
  UNION ALL
  SELECT time, 0, cost FROM infaas.query_outcomes
  WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s AND parent IS NULL
) both_sides
GROUP BY 1
ORDER BY 1
