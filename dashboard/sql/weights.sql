-- What feedback taught about the members of an app, by bucket: their weights, and how often they were wrong.
SELECT date_bin(%(step)s, time, %(start)s) AS time, member, avg(weight) AS weight, avg(loss) AS error
FROM infaas.selection_events
WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s
  AND (%(whole)s OR context IS NOT DISTINCT FROM %(context)s::text)
GROUP BY 1, 2
ORDER BY 1, 2
