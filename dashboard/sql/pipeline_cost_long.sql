-- The same from the hours, which have no charges by query.
SELECT date_bin(%(step)s, hour, %(start)s) AS time, sum(cost) AS kept, 0::double precision AS charged
FROM infaas.cost_by_app_hourly
WHERE app = %(app)s AND hour >= %(start)s AND hour < %(end)s
GROUP BY 1
ORDER BY 1
