-- Online queries and how they ended, by bucket and app, from the minutes.
SELECT date_bin(%(step)s, minute, %(start)s) AS time, app,
       sum(queries)::bigint AS queries,
       sum(queries - late - refused - errors)::bigint AS in_time,
       sum(late)::bigint AS late, sum(refused)::bigint AS refused, sum(errors)::bigint AS errors
FROM infaas.slo_by_app_minutely
WHERE minute >= %(start)s AND minute < %(end)s
GROUP BY 1, 2
ORDER BY 1, 2
