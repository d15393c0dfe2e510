-- What users ask, under the names that the contract fixes. All of them read with their owner's rights.

CREATE VIEW infaas.apps AS
SELECT a.app,
       coalesce(l.models, '{}') AS models,
       coalesce(l.versions, '{}') AS versions,
       coalesce(l.variants, 0) AS variants,
       a.latency_ms, a.default_output, a.min_instances, a.inputs, a.outputs, a.created
FROM infaas_internal.apps a
LEFT JOIN LATERAL (
  SELECT array_agg(m.model ORDER BY m.model) AS models,
         jsonb_object_agg(m.model, m.version) AS versions,
         sum((SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version))::bigint AS variants
  FROM infaas_internal.app_models m WHERE m.app = a.app
) l ON true;

-- apps: linked to the model in any version; serving: those that this version serves.
CREATE VIEW infaas.models AS
SELECT m.model, m.version,
       ARRAY(SELECT l.app FROM infaas_internal.app_models l WHERE l.model = m.model ORDER BY 1) AS apps,
       ARRAY(SELECT l.app FROM infaas_internal.app_models l WHERE l.model = m.model AND l.version = m.version ORDER BY 1) AS serving,
       m.task, m.metric, m.format,
       (SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version) AS variants,
       m.created, m.inputs, m.outputs, m.registration
FROM infaas_internal.models m;

-- What was last said of each instance, to each app, since its worker's present monitor started: a new one tells everything
-- again, and what an older one said of instances that died with their machine is not true any more.
CREATE VIEW infaas_internal.told AS
SELECT i.instance, i.app, i.model, i.variant, i.worker, i.device, i.state, i.since
FROM infaas_internal.instances i LEFT JOIN infaas_internal.workers w USING (worker)
WHERE w.started IS NULL OR i.since >= w.started;

-- Instances that are there as far as anybody knows: they have not ended, and their worker is neither gone nor silent.
CREATE VIEW infaas_internal.live_instances AS
SELECT i.instance, i.model, i.variant, i.worker, i.device, i.state, i.since
FROM (
  SELECT DISTINCT ON (instance) instance, model, variant, worker, device, state, since
  FROM infaas_internal.told ORDER BY instance, since DESC, state = 'Inactive' DESC
) i
LEFT JOIN infaas_internal.workers w USING (worker)
WHERE i.state <> 'Inactive'
  AND (w.state IS NULL OR w.since < i.since OR lower(w.state) NOT IN ('stopped', 'left', 'lost', 'dead', 'gone', 'removed'))
  AND (w.seen IS NULL OR greatest(w.seen, i.since) > now() - interval '30 seconds');

-- Every instance as each app sees it, and a row without a worker for each variant that has none.
-- What an app was told of an instance holds while the instance serves; another app's trouble is not this one's.
CREATE VIEW infaas.variant_states AS
WITH linked AS (
  SELECT l.app, v.model, v.variant, v.since
  FROM infaas_internal.variants v LEFT JOIN infaas_internal.app_models l USING (model, version)
), users AS (
  SELECT l.app, i.instance FROM infaas_internal.live_instances i JOIN linked l USING (variant)
  UNION
  SELECT nullif(t.app, ''), t.instance
  FROM infaas_internal.told t JOIN infaas_internal.live_instances i USING (instance)
  WHERE t.app <> '' OR NOT EXISTS (SELECT FROM linked l WHERE l.variant = i.variant)
)
SELECT u.app, i.model, i.variant, i.worker, i.device,
       CASE WHEN i.state NOT IN ('Active', 'Overloaded', 'Interfered') THEN i.state
            ELSE coalesce(t.state, 'Active') END AS state,
       CASE WHEN i.state NOT IN ('Active', 'Overloaded', 'Interfered') THEN i.since
            ELSE coalesce(t.since, i.since) END AS since,
       i.instance
FROM users u
JOIN infaas_internal.live_instances i USING (instance)
LEFT JOIN infaas_internal.told t ON t.instance = u.instance AND t.app = coalesce(u.app, '')
UNION ALL
SELECT l.app, l.model, l.variant, NULL, NULL, 'Inactive',
       coalesce((SELECT max(i.since) FROM infaas_internal.instances i WHERE i.variant = l.variant AND i.state = 'Inactive'), l.since),
       NULL
FROM linked l
WHERE NOT EXISTS (SELECT FROM infaas_internal.live_instances i WHERE i.variant = l.variant);

-- state: that of the variant's best instance.
CREATE VIEW infaas.variants AS
SELECT l.app, v.model, v.version, v.variant, v.hardware, v.framework, v.precision, v.threads, v.max_batch, v.accuracy,
       v.load_ms, v.latency_ms, v.memory_mb, v.saturation_qps, v.price_per_hour, v.cost_per_1000,
       coalesce(s.state, 'Inactive') AS state, v.simulated,
       v.agreement, v.batching, v.provenance, v.dominated, v.attributes, coalesce(s.instances, 0) AS instances
FROM infaas_internal.variants v
LEFT JOIN infaas_internal.app_models l USING (model, version)
LEFT JOIN LATERAL (
  SELECT (array_agg(t.state ORDER BY array_position(
            ARRAY['Active', 'Interfered', 'Overloaded', 'Warm', 'Loading', 'Unloading', 'Inactive'], t.state)))[1] AS state,
         count(t.instance)::integer AS instances
  FROM infaas.variant_states t WHERE t.variant = v.variant AND t.app IS NOT DISTINCT FROM l.app
) s ON true;

-- Cost by the hour: what instances cost while they were there (app null: the part of workers that nobody used), beside the
-- queries that arrived, refused ones too.
CREATE VIEW infaas.cost_by_variant_hourly AS
WITH spent AS (
  SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour, app, model, variant, hardware, sum(cost) AS cost
  FROM infaas.cost_events GROUP BY 1, 2, 3, 4, 5
), asked AS (
  SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour, app, model, variant, hardware, count(*) AS queries
  FROM infaas.query_outcomes GROUP BY 1, 2, 3, 4, 5
)
SELECT hour, app, model, variant, hardware, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(queries), 0)::double precision AS cost_per_1000
FROM (
  SELECT hour, app, model, variant, hardware, cost, 0::bigint AS queries FROM spent
  UNION ALL
  SELECT hour, app, model, variant, hardware, 0, queries FROM asked
) both_sides
GROUP BY hour, app, model, variant, hardware;

CREATE VIEW infaas.cost_by_app_hourly AS
SELECT hour, app, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(queries), 0)::double precision AS cost_per_1000
FROM infaas.cost_by_variant_hourly
GROUP BY hour, app;

-- attainment: the share of all queries that were answered in time; latencies of those that were answered at all.
CREATE VIEW infaas.slo_by_app_minutely AS
SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00') AS minute, app,
       count(*) AS queries,
       count(*) FILTER (WHERE outcome = 'late') AS late,
       count(*) FILTER (WHERE outcome = 'refused') AS refused,
       count(*) FILTER (WHERE outcome = 'error') AS errors,
       (count(*) FILTER (WHERE outcome IN ('ok', 'default')))::double precision / count(*) AS attainment,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p99_ms
FROM infaas.query_outcomes
GROUP BY 1, 2;
