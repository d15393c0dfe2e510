-- The variants with everything that was measured of them; a row for each app that a variant serves.
SELECT app, model, version, variant, hardware, framework, precision, threads, max_batch, accuracy, accuracy_low,
       accuracy_high, latency_ms, load_ms, init_ms, transfer_ms, memory_mb, host_mb, saturation_qps, cost_per_1000, price_per_hour, state, instances, simulated, dominated, provenance,
       alone, metric, measured, differing, functions,
       coalesce((SELECT o ->> 'unit' FROM infaas.models m, jsonb_array_elements(m.outputs) o
                 WHERE m.model = v.model AND m.version = v.version AND o ->> 'unit' <> '' LIMIT 1), '') AS unit
FROM infaas.variants v
ORDER BY app, model, cost_per_1000
