-- What policies beside the system would have done, the latest first.
SELECT time, policy, scaler, action, count, app, variant, worker, reason
FROM infaas.shadow_events
WHERE time >= %(start)s AND time < %(end)s AND action <> 'sample'
ORDER BY time DESC
LIMIT 200
