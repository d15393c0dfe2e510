-- The first changes of instances after a time: by these it is known in which states they were before.
SELECT time, instance, from_state
FROM infaas.state_events
WHERE time >= %(end)s
ORDER BY time
LIMIT 1000
