-- How instances changed their state, and why. app null: of the instance as such.
SELECT time, app, variant, worker, device, instance, from_state, to_state, reason
FROM infaas.state_events
WHERE time >= %(start)s AND time < %(end)s
ORDER BY time DESC
LIMIT 2000
