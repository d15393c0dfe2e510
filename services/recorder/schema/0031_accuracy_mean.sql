-- accuracy_mean: that the app's answers have in the mean; worth: US$ per 1,000 answers for a point of accuracy more. Null: the app has none of
-- its own.
ALTER TABLE infaas_internal.apps ADD COLUMN accuracy_mean double precision, ADD COLUMN worth double precision;
CREATE OR REPLACE VIEW infaas.apps AS
SELECT a.app,
       coalesce(l.models, '{}') AS models,
       coalesce(l.versions, '{}') AS versions,
       coalesce(l.variants, 0) AS variants,
       a.latency_ms, a.default_output, a.min_instances, a.inputs, a.outputs, a.created, a.slo_target, a.own_target, a.pipeline,
       a.accuracy, a.graph, a.plan, a.selection, a.accuracy_mean, a.worth
FROM infaas_internal.apps a
LEFT JOIN LATERAL (
  SELECT array_agg(m.model ORDER BY m.model) AS models,
         jsonb_object_agg(m.model, m.version) AS versions,
         sum((SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version))::bigint AS variants
  FROM infaas_internal.app_models m WHERE m.app = a.app
) l ON true;
