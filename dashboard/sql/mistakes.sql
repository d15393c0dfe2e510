-- What clients asked wrongly: how often, of which app (null: none was named), and how.
SELECT app, code AS reason, sum(count)::bigint AS queries, min(time) AS first, max(time) AS last
FROM infaas.client_errors
WHERE time >= %(start)s AND time < %(end)s
GROUP BY app, code
ORDER BY queries DESC
LIMIT 200
