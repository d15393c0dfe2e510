-- Load, forecast and capacity of each app, by bucket. Items per second.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app,
       avg(load) AS load, avg(forecast) AS forecast, avg(capacity) AS capacity
FROM infaas.objective_events
WHERE time >= %(start)s AND time < %(end)s
GROUP BY 1, 2
ORDER BY 1, 2
