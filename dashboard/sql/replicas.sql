-- How many replicas the vertices of a pipeline are to have: the changes in the range, and what was there before.
SELECT greatest(time, %(start)s) AS time, time >= %(start)s AS changed, vertex, action, from_replicas, to_replicas AS replicas, lambda_max, window_s, reason
FROM (
  SELECT * FROM infaas.pipeline_events WHERE pipeline = %(app)s AND time >= %(start)s AND time < %(end)s
  UNION ALL
  SELECT * FROM (
    SELECT DISTINCT ON (vertex) * FROM infaas.pipeline_events
    WHERE pipeline = %(app)s AND time < %(start)s ORDER BY vertex, time DESC
  ) before
) both_times
ORDER BY time DESC, vertex
LIMIT 2000
