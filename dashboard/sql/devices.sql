-- Every device as it said last, with its worker's state. Whether a device is simulated is known from its last account.
SELECT s.worker, s.device, s.hardware, s.time, s.utilisation, s.foreign_use, s.memory_mb, s.memory_used_mb, s.host_used_mb, s.load, s.queue,
       coalesce(c.simulated, false) AS simulated, c.per_hour,
       w.to_state AS state, w.time AS since, w.reason, w.hardware AS kind
FROM (
  SELECT DISTINCT ON (worker, device) * FROM infaas.worker_samples
  WHERE time > now() - interval '15 seconds' ORDER BY worker, device, time DESC
) s
LEFT JOIN LATERAL (
  SELECT to_state, time, reason, hardware FROM infaas.worker_events e WHERE e.worker = s.worker ORDER BY time DESC LIMIT 1
) w ON true
LEFT JOIN (
  SELECT worker, hardware, bool_and(simulated) AS simulated, 3600 * sum(cost) / nullif(max(seconds), 0) AS per_hour
  FROM (
    SELECT *, max(time) OVER (PARTITION BY worker) AS last FROM infaas.cost_events WHERE time > now() - interval '40 seconds'
  ) recent
  WHERE time = last
  GROUP BY worker, hardware
) c ON c.worker = s.worker AND c.hardware = s.hardware
ORDER BY s.worker, s.device
