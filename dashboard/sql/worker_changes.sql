-- How workers came and went, and why.
SELECT time, worker, hardware, from_state, to_state, reason
FROM infaas.worker_events
WHERE time >= %(start)s AND time < %(end)s
ORDER BY time DESC
LIMIT 2000
