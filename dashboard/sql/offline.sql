-- Items that offline jobs had computed, by bucket and app.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app, sum(items)::bigint AS items
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND policy = 'offline' AND payer IS NULL AND outcome IN ('ok', 'late')
GROUP BY 1, 2
ORDER BY 1, 2
