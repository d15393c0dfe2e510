-- Every instance that is there, as each app sees it, with its last sample.
SELECT s.app, s.model, s.variant, s.instance, s.worker, s.device, s.state, s.since,
       v.hardware, v.simulated, v.accuracy, v.accuracy_low, v.accuracy_high, v.metric, v.latency_ms AS profiled_ms, v.cost_per_1000, v.saturation_qps,
       i.load, i.queue, i.latency_ms, i.mean_batch, i.utilisation, i.memory_mb,
       array_remove(ARRAY[s.state, CASE WHEN i.reclaimable THEN 'reclaimable' END], NULL) AS states
FROM infaas.variant_states s
LEFT JOIN (
  SELECT DISTINCT ON (variant) variant, hardware, simulated, accuracy, accuracy_low, accuracy_high, metric, latency_ms, cost_per_1000,
         saturation_qps
  FROM infaas.variants
) v USING (variant)
LEFT JOIN (
  SELECT DISTINCT ON (instance, app) instance, app, load, queue, latency_ms, mean_batch, utilisation, memory_mb, reclaimable
  FROM infaas.instance_samples WHERE time > now() - interval '10 seconds'
  ORDER BY instance, app, time DESC
) i ON i.instance = s.instance AND (i.app = s.app OR i.app IS NULL)
WHERE s.worker IS NOT NULL
ORDER BY s.app, s.model, s.variant, s.instance
