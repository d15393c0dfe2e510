-- How many items were answered, by app and variant; offline work, too, which costs as well.
SELECT app, variant, sum(items)::bigint AS items
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome IN ('ok', 'late')
GROUP BY app, variant
