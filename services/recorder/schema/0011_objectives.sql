-- What apps are to reach, what they reach, and what the leading VM-autoscaler expects of them.
CREATE TABLE infaas.objective_events (
  time       timestamptz NOT NULL,
  app        text NOT NULL,
  slo_target double precision NOT NULL,  -- share of queries to be answered in time
  reached    double precision,           -- share that was, of the last minutes; null: there were no queries
  load       double precision NOT NULL,  -- items/s now
  forecast   double precision NOT NULL,  -- items/s for the time when what is ordered now would be ready
  capacity   double precision NOT NULL,  -- items/s that the loaded instances carry in time
  headroom   double precision            -- capacity / forecast; null: nothing is expected
);
CREATE INDEX objective_events_time ON infaas.objective_events (time DESC);

-- slo_target: the target that holds, the app's own or else that of the settings. Null until the recorder has written the app again.
ALTER TABLE infaas_internal.apps ADD COLUMN slo_target double precision, ADD COLUMN own_target boolean NOT NULL DEFAULT false;
CREATE OR REPLACE VIEW infaas.apps AS
SELECT a.app,
       coalesce(l.models, '{}') AS models,
       coalesce(l.versions, '{}') AS versions,
       coalesce(l.variants, 0) AS variants,
       a.latency_ms, a.default_output, a.min_instances, a.inputs, a.outputs, a.created, a.slo_target, a.own_target
FROM infaas_internal.apps a
LEFT JOIN LATERAL (
  SELECT array_agg(m.model ORDER BY m.model) AS models,
         jsonb_object_agg(m.model, m.version) AS versions,
         sum((SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version))::bigint AS variants
  FROM infaas_internal.app_models m WHERE m.app = a.app
) l ON true;
