-- What was scaled, by whom and why, the latest first.
SELECT time, scaler, action, count, app, variant, worker, reason, solver, solve_ms
FROM infaas.scaling_events
WHERE time >= %(start)s AND time < %(end)s
ORDER BY time DESC
LIMIT 200
