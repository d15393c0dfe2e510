-- The views of the contract over rollups, the same at every level; carried out by every `prepare`.

-- Cost by the hour: what instances cost while they were there (app null: the part of workers that nobody used), beside the
-- queries that arrived, refused ones too. simulated_cost: the part of `cost` that nobody has to pay. A query that several models
-- answered is one query. asked: parts, and queries without parts: what a variant has answered, for whatever query. app: who pays.
CREATE OR REPLACE VIEW infaas.cost_by_variant_hourly AS
SELECT hour, app, model, variant, hardware, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(asked), 0)::double precision AS cost_per_1000,
       sum(items)::bigint AS items, sum(simulated_cost) AS simulated_cost, sum(seconds) AS seconds, sum(busy_seconds) AS busy_seconds,
       sum(asked)::bigint AS asked, sum(asked_items)::bigint AS asked_items
FROM (
  SELECT hour, app, model, variant, hardware, cost, 0::bigint AS queries, 0::bigint AS items,
         CASE WHEN simulated THEN cost ELSE 0 END AS simulated_cost, seconds, busy_seconds, 0::bigint AS asked, 0::bigint AS asked_items
  FROM infaas_internal.cost_hourly
  UNION ALL
  SELECT hour, coalesce(payer, app), model, variant, hardware, 0, queries, items, 0, 0, 0, asked, asked_items FROM infaas_internal.query_hourly
) both_sides
GROUP BY hour, app, model, variant, hardware;

CREATE OR REPLACE VIEW infaas.cost_by_app_hourly AS
SELECT hour, app, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(queries), 0)::double precision AS cost_per_1000, sum(simulated_cost) AS simulated_cost
FROM infaas.cost_by_variant_hourly
GROUP BY hour, app;

-- How queries and their parts ended, by the hour: sums from which means follow. The hour in which a watermark is has two rows of a kind.
CREATE OR REPLACE VIEW infaas.outcomes_hourly AS
SELECT hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline, outcomes, all_items AS items, all_cost AS cost,
       accuracy_sum, accuracy_rows, batch_sum, batch_rows, confidence_sum, confidence_rows, incomplete, simulated, first, last
FROM infaas_internal.query_hourly WHERE outcome IS NOT NULL;

-- The same of any range, in full: whole hours from there, and its edges from raw rows.
DO $$
DECLARE
  edge text := 'UNION ALL SELECT hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline, outcomes, all_items,'
    ' all_cost, accuracy_sum, accuracy_rows, batch_sum, batch_rows, confidence_sum, confidence_rows, incomplete, simulated, first, last FROM (%s) edge ';
  bucket text := $q$date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour$q$;
  first_hour text := $q$date_bin('1 hour', since + interval '3599.999999 s', '2000-01-03 00:00:00+00')$q$;
  last_hour text := $q$date_bin('1 hour', until, '2000-01-03 00:00:00+00')$q$;
BEGIN
  EXECUTE 'CREATE OR REPLACE FUNCTION infaas.outcomes_between(since timestamptz, until timestamptz) RETURNS SETOF infaas.outcomes_hourly'
    ' LANGUAGE sql STABLE PARALLEL SAFE AS $f$ SELECT * FROM infaas.outcomes_hourly'
    || format(' WHERE hour >= %s AND hour < %s ', first_hour, last_hour)
    || format(edge, infaas_internal.outcome_sums(bucket, format(
      'infaas.query_outcomes WHERE time >= since AND time < least(%s, until)', first_hour)))
    || format(edge, infaas_internal.outcome_sums(bucket, format(
      'infaas.query_outcomes WHERE time >= greatest(%s, %s) AND time < until', first_hour, last_hour)))
    || '$f$';
END $$;

-- attainment: the share of all queries that were answered in time; latencies of those that were answered at all. Offline work
-- has no objective: its queries wait for spare capacity and are left out, and so are queries that their clients took back. slo_target: what attainment should be now; null if the app
-- is no longer there.
CREATE OR REPLACE VIEW infaas.slo_by_app_minutely AS
SELECT s.minute, s.app, s.good + s.late + s.refused + s.errors AS queries, s.late, s.refused, s.errors,
       s.good::double precision / (s.good + s.late + s.refused + s.errors) AS attainment, s.p50_ms, s.p99_ms, a.slo_target
FROM infaas_internal.slo_minutely s LEFT JOIN infaas_internal.apps a USING (app)
WHERE s.good + s.late + s.refused + s.errors > 0;

-- What answers reach by their labels, beside what was promised. The interval holds at every moment of the hour, with 95 % (Robbins, 1970: a
-- normal mixture, which is tightest after some 100 labels).
CREATE OR REPLACE VIEW infaas.accuracy_by_app_hourly AS
SELECT time, app, promised, found, greatest(0, found - margin) AS low, least(1, found + margin) AS high, labels,
       (1 - found) / nullif(1 - promised, 0) AS burn
FROM (
  SELECT date_trunc('hour', coalesce(asked, time)) AS time, app, avg(promised) AS promised, avg(score) AS found, count(*) AS labels,
         sqrt((count(*) / 4.0 + 5) * ln((count(*) / 4.0 + 5) / (5 * 0.05 ^ 2))) / count(*) AS margin
  FROM infaas.feedback WHERE score IS NOT NULL GROUP BY 1, 2
) hourly;

-- The same for pipelines. cost: of the instances that are kept for the pipeline; null where no such row is left.
CREATE OR REPLACE VIEW infaas.slo_by_pipeline_minutely AS
SELECT s.minute, s.app AS pipeline, s.queries, s.late, s.refused, s.errors, s.attainment, s.p50_ms, s.p99_ms, s.slo_target, c.cost
FROM infaas.slo_by_app_minutely s JOIN infaas_internal.apps a ON a.app = s.app AND a.pipeline
LEFT JOIN LATERAL (
  SELECT sum(e.cost) AS cost FROM infaas.cost_events e
  WHERE e.app = s.app AND e.time >= s.minute AND e.time < s.minute + interval '1 minute'
) c ON true;

-- state: that of the variant's best instance. Prices are those of an instance on the devices that are there now (a device of its own
-- size where there is none), as dispatchers count.
CREATE OR REPLACE VIEW infaas.variants AS
SELECT l.app, v.model, v.version, v.variant, v.hardware, v.framework, v.precision, v.threads, v.max_batch, v.accuracy,
       v.load_ms, v.latency_ms, v.memory_mb, v.saturation_qps, d.share * v.price_per_hour AS price_per_hour,
       d.share * v.cost_per_1000 AS cost_per_1000,
       coalesce(s.state, 'Inactive') AS state, v.simulated,
       v.agreement, v.batching, v.provenance, v.dominated, v.attributes, coalesce(s.instances, 0) AS instances,
       v.accuracy_low, v.accuracy_high, v.init_ms, v.transfer_ms, v.host_mb, v.model_accuracy, v.alone,
       v.differing, v.metric, v.measured, v.functions
FROM (
  SELECT *, CASE WHEN shared THEN memory_mb END AS takes_mb FROM infaas_internal.variants
) v
LEFT JOIN infaas_internal.app_models l USING (model, version)
LEFT JOIN (
  SELECT DISTINCT ON (hardware) hardware, memory_mb AS has_mb FROM infaas.worker_samples
  WHERE time > now() - interval '1 minute' AND memory_mb > 0 ORDER BY hardware, worker, device, time DESC
) device USING (hardware)
CROSS JOIN LATERAL (SELECT least(1.0, coalesce(v.takes_mb / device.has_mb, 1.0)) AS share) d
LEFT JOIN LATERAL (
  SELECT (array_agg(t.state ORDER BY array_position(
            ARRAY['Active', 'Interfered', 'Overloaded', 'Loading', 'Warm', 'Unloading', 'Inactive'], t.state)))[1] AS state,
         count(t.instance)::integer AS instances
  FROM infaas.variant_states t WHERE t.variant = v.variant AND t.app IS NOT DISTINCT FROM l.app
) s ON true;
