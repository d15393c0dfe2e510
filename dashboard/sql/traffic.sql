-- Online queries and how they ended, by bucket and app, from single rows.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app,
       count(*) AS queries,
       count(*) FILTER (WHERE outcome IN ('ok', 'default')) AS in_time,
       count(*) FILTER (WHERE outcome = 'late') AS late,
       count(*) FILTER (WHERE outcome = 'refused') AS refused,
       count(*) FILTER (WHERE outcome = 'error') AS errors
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND parent IS NULL AND policy IS DISTINCT FROM 'offline' AND outcome <> 'cancelled'
GROUP BY 1, 2
ORDER BY 1, 2
