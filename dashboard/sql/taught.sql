-- The same for the whole range, with the last weight and the last probability of each member.
SELECT member, count(*) AS feedbacks, count(*) FILTER (WHERE reevaluated) AS reevaluated, avg(loss) AS error,
       (array_agg(weight ORDER BY time DESC))[1] AS weight, (array_agg(probability ORDER BY time DESC))[1] AS probability
FROM infaas.selection_events
WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s
  AND (%(whole)s OR context IS NOT DISTINCT FROM %(context)s::text)
GROUP BY member
ORDER BY weight DESC, member
