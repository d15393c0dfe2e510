-- What the leading VM-autoscaler said last of each app, in the last ten minutes of the range.
SELECT DISTINCT ON (app) app, time, load, forecast, capacity, headroom
FROM infaas.objective_events
WHERE time >= greatest(%(start)s, %(end)s - interval '10 minutes') AND time < %(end)s
ORDER BY app, time DESC
