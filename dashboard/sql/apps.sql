-- The applications.
SELECT app, models, variants, latency_ms, min_instances, slo_target, accuracy_mean, worth, default_output IS NOT NULL AS has_default, pipeline, created
FROM infaas.apps ORDER BY app
