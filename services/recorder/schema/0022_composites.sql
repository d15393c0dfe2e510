-- graph: of a pipeline, its stages, edges and outputs as in its file; plan: the one that is deployed; selection: how several models answer
-- together. Null where there is none, or until the recorder has written the app again.
ALTER TABLE infaas_internal.apps ADD COLUMN graph jsonb, ADD COLUMN plan jsonb, ADD COLUMN selection jsonb;
CREATE OR REPLACE VIEW infaas.apps AS
SELECT a.app,
       coalesce(l.models, '{}') AS models,
       coalesce(l.versions, '{}') AS versions,
       coalesce(l.variants, 0) AS variants,
       a.latency_ms, a.default_output, a.min_instances, a.inputs, a.outputs, a.created, a.slo_target, a.own_target, a.pipeline,
       a.accuracy, a.graph, a.plan, a.selection
FROM infaas_internal.apps a
LEFT JOIN LATERAL (
  SELECT array_agg(m.model ORDER BY m.model) AS models,
         jsonb_object_agg(m.model, m.version) AS versions,
         sum((SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version))::bigint AS variants
  FROM infaas_internal.app_models m WHERE m.app = a.app
) l ON true;
