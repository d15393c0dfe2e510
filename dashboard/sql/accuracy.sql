-- What answers reached by their labels, beside what was promised, by the hour.
SELECT time, app, promised, found, low, high, labels, burn
FROM infaas.accuracy_by_app_hourly
WHERE time >= date_trunc('hour', %(start)s::timestamptz) AND time < %(end)s
ORDER BY app, time
