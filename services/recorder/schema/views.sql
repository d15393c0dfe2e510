-- The views of the contract over rollups, the same at every level; carried out by every `prepare`.

-- Cost by the hour: what instances cost while they were there (app null: the part of workers that nobody used), beside the
-- queries that arrived, refused ones too. simulated_cost: the part of `cost` that nobody has to pay.
CREATE OR REPLACE VIEW infaas.cost_by_variant_hourly AS
SELECT hour, app, model, variant, hardware, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(queries), 0)::double precision AS cost_per_1000,
       sum(items)::bigint AS items, sum(simulated_cost) AS simulated_cost, sum(seconds) AS seconds, sum(busy_seconds) AS busy_seconds
FROM (
  SELECT hour, app, model, variant, hardware, cost, 0::bigint AS queries, 0::bigint AS items,
         CASE WHEN simulated THEN cost ELSE 0 END AS simulated_cost, seconds, busy_seconds
  FROM infaas_internal.cost_hourly
  UNION ALL
  SELECT hour, app, model, variant, hardware, 0, queries, items, 0, 0, 0 FROM infaas_internal.query_hourly
) both_sides
GROUP BY hour, app, model, variant, hardware;

CREATE OR REPLACE VIEW infaas.cost_by_app_hourly AS
SELECT hour, app, sum(cost) AS cost, sum(queries)::bigint AS queries,
       1000 * sum(cost) / nullif(sum(queries), 0)::double precision AS cost_per_1000
FROM infaas.cost_by_variant_hourly
GROUP BY hour, app;

-- attainment: the share of all queries that were answered in time; latencies of those that were answered at all. Offline work
-- has no objective: its queries wait for spare capacity and are left out.
CREATE OR REPLACE VIEW infaas.slo_by_app_minutely AS
SELECT minute, app, queries, late, refused, errors, good::double precision / queries AS attainment, p50_ms, p99_ms
FROM infaas_internal.slo_minutely;
