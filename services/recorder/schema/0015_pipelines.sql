-- How many replicas the vertices of deployed pipelines are to have: a row for each vertex whose number changes.
CREATE TABLE infaas.pipeline_events (
  time          timestamptz NOT NULL,
  pipeline      text NOT NULL,
  vertex        text NOT NULL,
  action        text NOT NULL,     -- deploy, up, down, end
  from_replicas bigint NOT NULL,
  to_replicas   bigint NOT NULL,
  lambda_max    double precision,  -- queries/s that the replicas are for; null: they end
  window_s      double precision,  -- the time in which that rate was seen; null: it is that of the plan
  reason        text NOT NULL
);
CREATE INDEX pipeline_events_time ON infaas.pipeline_events (time DESC);

COMMENT ON TABLE infaas.pipeline_events IS 'One change of the replicas that a vertex of a deployed pipeline is to have';
COMMENT ON COLUMN infaas.pipeline_events.time IS 'when the leading VM-autoscaler decided';
COMMENT ON COLUMN infaas.pipeline_events.pipeline IS 'name of the pipeline, an app';
COMMENT ON COLUMN infaas.pipeline_events.vertex IS 'name of the vertex, as stage in query_outcomes';
COMMENT ON COLUMN infaas.pipeline_events.action IS 'deploy, up, down or end';
COMMENT ON COLUMN infaas.pipeline_events.from_replicas IS 'replicas until then';
COMMENT ON COLUMN infaas.pipeline_events.to_replicas IS 'replicas from then on';
COMMENT ON COLUMN infaas.pipeline_events.lambda_max IS 'queries/s that the replicas are for; null: they end';
COMMENT ON COLUMN infaas.pipeline_events.window_s IS 'seconds in which that rate was seen; null: it is that of the plan';
COMMENT ON COLUMN infaas.pipeline_events.reason IS 'why, and which replicas found no room';

-- pipeline: whether other apps answer for it. False until the recorder has written the app again.
ALTER TABLE infaas_internal.apps ADD COLUMN pipeline boolean NOT NULL DEFAULT false;
CREATE OR REPLACE VIEW infaas.apps AS
SELECT a.app,
       coalesce(l.models, '{}') AS models,
       coalesce(l.versions, '{}') AS versions,
       coalesce(l.variants, 0) AS variants,
       a.latency_ms, a.default_output, a.min_instances, a.inputs, a.outputs, a.created, a.slo_target, a.own_target, a.pipeline
FROM infaas_internal.apps a
LEFT JOIN LATERAL (
  SELECT array_agg(m.model ORDER BY m.model) AS models,
         jsonb_object_agg(m.model, m.version) AS versions,
         sum((SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version))::bigint AS variants
  FROM infaas_internal.app_models m WHERE m.app = a.app
) l ON true;
