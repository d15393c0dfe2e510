-- Every device as it said last, with its worker's state.
SELECT s.worker, s.device, s.hardware, s.time, s.utilisation, s.memory_mb, s.memory_used_mb, s.load, s.queue,
       w.to_state AS state, w.time AS since, w.reason, w.hardware AS kind
FROM (
  SELECT DISTINCT ON (worker, device) * FROM infaas.worker_samples
  WHERE time > now() - interval '15 seconds' ORDER BY worker, device, time DESC
) s
LEFT JOIN LATERAL (
  SELECT to_state, time, reason, hardware FROM infaas.worker_events e WHERE e.worker = s.worker ORDER BY time DESC LIMIT 1
) w ON true
ORDER BY s.worker, s.device
