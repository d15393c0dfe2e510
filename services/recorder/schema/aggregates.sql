-- With all of TimescaleDB: continuous aggregates by the minute, and of those by the hour, answer where rollups.sql has stores,
-- watermarks and triggers. Carried out by `prepare` in one transaction, after hypertables.sql, in its search_path the extension's
-- schema. What the stores hold of times whose raw rows are gone stays there, and is added.

-- The definition of an aggregate cannot be changed. Those of before 0014_parts.sql count parts as queries, those of before 0023_payer.sql
-- know no payer, and those of before 0034_outcomes_hourly.sql not how queries ended: what they alone still know goes to the stores, and
-- they are made anew from the raw rows.
DO $$
DECLARE
  taken timestamptz;
  columns name[];
  asked text := 'asked, asked_items';
  payer text := 'payer';
BEGIN
  SELECT array_agg(attname) INTO columns FROM pg_attribute WHERE attrelid = to_regclass('infaas_internal.query_hour');
  IF columns IS NULL OR 'outcome' = ANY (columns) THEN
    RETURN;
  END IF;
  IF 'payer' <> ALL (columns) THEN
    payer := 'NULL';
  END IF;
  IF 'asked' <> ALL (columns) THEN
    asked := 'queries, items';
  END IF;
  LOCK TABLE infaas.query_outcomes IN ACCESS EXCLUSIVE MODE;
  -- Raw rows are whole from here on: chunks of a day are dropped once all of it is too old. Single rows before came too late.
  SELECT date_bin('1 hour', min(time), '2000-01-03 00:00:00+00') INTO taken FROM infaas.query_outcomes
  WHERE time >= coalesce(now() - interval '1 day' - (SELECT keep FROM infaas_internal.retention WHERE relation = 'query_outcomes'), '-infinity');
  taken := coalesce(taken, 'infinity');
  EXECUTE format($insert$
    INSERT INTO infaas_internal.query_hours AS known (hour, app, payer, model, variant, hardware, queries, items, charged, asked, asked_items)
    SELECT hour, app, %s, model, variant, hardware, queries, items, charged, %s FROM infaas_internal.query_hour WHERE hour < $1
    ON CONFLICT (hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline) DO UPDATE
    SET queries = known.queries + excluded.queries, items = known.items + excluded.items, charged = known.charged + excluded.charged,
      asked = known.asked + excluded.asked, asked_items = known.asked_items + excluded.asked_items
    $insert$, payer, asked) USING taken;
  INSERT INTO infaas_internal.slo_minutes AS known (minute, app, queries, good, late, refused, errors, p50_ms, p99_ms)
  SELECT minute, app, queries, good, late, refused, errors, p50_ms, p99_ms FROM infaas_internal.slo_minute WHERE minute < taken
  ON CONFLICT (minute, app) DO UPDATE SET queries = known.queries + excluded.queries, good = known.good + excluded.good,
    late = known.late + excluded.late, refused = known.refused + excluded.refused, errors = known.errors + excluded.errors;
  DELETE FROM infaas.query_outcomes WHERE time < taken;
  EXECUTE format('CREATE OR REPLACE VIEW infaas_internal.query_hourly AS SELECT %s FROM infaas_internal.query_hours', infaas_internal.sum_columns());
  CREATE OR REPLACE VIEW infaas_internal.slo_minutely AS
  SELECT minute, app, queries, good, late, refused, errors, p50_ms, p99_ms FROM infaas_internal.slo_minutes;
  DROP MATERIALIZED VIEW infaas_internal.slo_minute;
  DROP MATERIALIZED VIEW infaas_internal.query_hour;
  DROP MATERIALIZED VIEW infaas_internal.query_minute;
END $$;

DO $$
DECLARE taken timestamptz;
BEGIN
  IF to_regclass('infaas_internal.cost_hour') IS NOT NULL THEN
    RETURN;  -- done by an earlier `prepare`
  END IF;
  LOCK TABLE infaas.cost_events IN ACCESS EXCLUSIVE MODE;
  DROP TRIGGER IF EXISTS late ON infaas.cost_events;
  DELETE FROM infaas.cost_events WHERE time < (SELECT floor FROM infaas_internal.watermarks WHERE source = 'cost_events');
  -- Raw rows are whole from here on (rollups.sql deletes whole hours): the aggregates answer for them.
  SELECT date_bin('1 hour', min(time), '2000-01-03 00:00:00+00') INTO taken FROM infaas.cost_events;
  DELETE FROM infaas_internal.cost_hours WHERE hour >= taken;

  CREATE MATERIALIZED VIEW infaas_internal.cost_minute WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
  SELECT time_bucket('1 minute', time) AS minute, app, model, variant, hardware, simulated,
         sum(cost) AS cost, sum(seconds) AS seconds, sum(busy_seconds) AS busy_seconds
  FROM infaas.cost_events GROUP BY 1, 2, 3, 4, 5, 6 WITH NO DATA;
  CREATE MATERIALIZED VIEW infaas_internal.cost_hour WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
  SELECT time_bucket('1 hour', minute) AS hour, app, model, variant, hardware, simulated,
         sum(cost) AS cost, sum(seconds) AS seconds, sum(busy_seconds) AS busy_seconds
  FROM infaas_internal.cost_minute GROUP BY 1, 2, 3, 4, 5, 6 WITH NO DATA;
END $$;

DO $$
DECLARE taken timestamptz;
BEGIN
  IF to_regclass('infaas_internal.query_hour') IS NOT NULL THEN
    RETURN;
  END IF;
  LOCK TABLE infaas.query_outcomes IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'infaas.query_outcomes'::regclass AND tgname = 'late') THEN  -- rollups.sql was here
    DROP TRIGGER late ON infaas.query_outcomes;
    DELETE FROM infaas.query_outcomes WHERE time < (SELECT floor FROM infaas_internal.watermarks WHERE source = 'query_outcomes');
    SELECT date_bin('1 hour', min(time), '2000-01-03 00:00:00+00') INTO taken FROM infaas.query_outcomes;
    DELETE FROM infaas_internal.query_hours WHERE hour >= taken;
    DELETE FROM infaas_internal.slo_minutes WHERE minute >= taken;
  END IF;

  EXECUTE format('CREATE MATERIALIZED VIEW infaas_internal.query_minute WITH (timescaledb.continuous, timescaledb.materialized_only = false)'
    ' AS %s WITH NO DATA', infaas_internal.outcome_sums($q$time_bucket('1 minute', time) AS minute$q$, 'infaas.query_outcomes'));
  EXECUTE format('CREATE MATERIALIZED VIEW infaas_internal.query_hour WITH (timescaledb.continuous, timescaledb.materialized_only = false)'
    ' AS %s WITH NO DATA', infaas_internal.sums_of_sums($q$time_bucket('1 hour', minute) AS hour$q$, 'infaas_internal.query_minute'));

  CREATE MATERIALIZED VIEW infaas_internal.slo_minute WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
  SELECT time_bucket('1 minute', time) AS minute, app, count(*) AS queries,
         count(*) FILTER (WHERE outcome IN ('ok', 'default')) AS good, count(*) FILTER (WHERE outcome = 'late') AS late,
         count(*) FILTER (WHERE outcome = 'refused') AS refused, count(*) FILTER (WHERE outcome = 'error') AS errors,
         percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p50_ms,
         percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p99_ms
  FROM infaas.query_outcomes WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL GROUP BY 1, 2 WITH NO DATA;
END $$;

CREATE OR REPLACE VIEW infaas_internal.cost_hourly AS
SELECT hour, app, model, variant, hardware, simulated, cost, seconds, busy_seconds FROM infaas_internal.cost_hours
UNION ALL
SELECT hour, app, model, variant, hardware, simulated, cost, seconds, busy_seconds FROM infaas_internal.cost_hour;
DO $$ BEGIN
  EXECUTE format('CREATE OR REPLACE VIEW infaas_internal.query_hourly AS SELECT %1$s FROM infaas_internal.query_hours'
    ' UNION ALL SELECT %1$s FROM infaas_internal.query_hour', infaas_internal.sum_columns());
END $$;
CREATE OR REPLACE VIEW infaas_internal.slo_minutely AS
SELECT minute, app, queries, good, late, refused, errors, p50_ms, p99_ms FROM infaas_internal.slo_minutes
UNION ALL
SELECT minute, app, queries, good, late, refused, errors, p50_ms, p99_ms FROM infaas_internal.slo_minute;

-- TimescaleDB's own scheduler does the work; the recorder's calls find nothing to do.
CREATE OR REPLACE FUNCTION infaas_internal.refresh_cost_events() RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE OR REPLACE FUNCTION infaas_internal.refresh_query_outcomes() RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE OR REPLACE FUNCTION infaas_internal.expire(of text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;

-- A plain retention policy does not ask whether rows have been aggregated, and none may go before.
CREATE OR REPLACE PROCEDURE infaas_internal.expire_aggregated(job_id integer, config jsonb) LANGUAGE plpgsql AS $$
DECLARE
  entry record;
  aggregated timestamptz;
BEGIN
  FOR entry IN
    SELECT w.relation::regclass AS relation, r.keep, w.aggregates
    FROM (VALUES
      ('infaas.query_outcomes', 'query_outcomes', ARRAY['query_minute', 'query_hour', 'slo_minute']),
      ('infaas.cost_events', 'cost_events', ARRAY['cost_minute', 'cost_hour']),
      ('infaas_internal.query_minute', 'query_outcomes', ARRAY['query_hour']),
      ('infaas_internal.cost_minute', 'cost_events', ARRAY['cost_hour'])
    ) AS w (relation, kept, aggregates)
    JOIN infaas_internal.retention r ON r.relation = w.kept
    WHERE r.keep IS NOT NULL
  LOOP
    SELECT min(_timescaledb_functions.to_timestamp(_timescaledb_functions.cagg_watermark(h.id))) INTO aggregated
    FROM timescaledb_information.continuous_aggregates c
    JOIN _timescaledb_catalog.hypertable h
      ON h.schema_name = c.materialization_hypertable_schema AND h.table_name = c.materialization_hypertable_name
    WHERE c.view_schema = 'infaas_internal' AND c.view_name = ANY (entry.aggregates);
    IF aggregated > '-infinity' THEN
      PERFORM drop_chunks(entry.relation, older_than => least(now() - entry.keep, aggregated));
    END IF;
  END LOOP;
  DELETE FROM infaas_internal.slo_minutes
  WHERE minute < now() - (SELECT keep FROM infaas_internal.retention WHERE relation = 'slo_by_app_minutely');
END $$;
