-- What keeps the stores of 0006_rollups.sql up to date without continuous aggregates: plain PostgreSQL, and TimescaleDB under
-- its Apache licence. Carried out by every `prepare`, so that all of it may change; the tables are in numbered files.
--
-- A source's watermark divides time. Rows before it are in the stores: those that were there when it moved (refresh_*), and
-- those that come later and are older (late_*, in the transaction that writes them). Rows after it are aggregated by whoever
-- asks. Writers hold the watermark's row FOR SHARE, who moves it waits for them: no row is left out or counted twice.

-- STABLE, so that the planner sees its value; with its owner's rights, since readers have none on this schema.
CREATE OR REPLACE FUNCTION infaas_internal.upto(of text) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT upto FROM infaas_internal.watermarks WHERE source = of $$;

CREATE OR REPLACE VIEW infaas_internal.cost_hourly AS
SELECT hour, app, model, variant, hardware, simulated, cost, seconds, busy_seconds FROM infaas_internal.cost_hours
UNION ALL
SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00'), app, model, variant, hardware, simulated,
       sum(cost), sum(seconds), sum(busy_seconds)
FROM infaas.cost_events
WHERE time >= infaas_internal.upto('cost_events')
GROUP BY 1, 2, 3, 4, 5, 6;

DO $$ BEGIN
  EXECUTE format('CREATE OR REPLACE VIEW infaas_internal.query_hourly AS SELECT %s FROM infaas_internal.query_hours UNION ALL %s',
    infaas_internal.sum_columns(), infaas_internal.outcome_sums($q$date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour$q$,
      $q$infaas.query_outcomes WHERE time >= infaas_internal.upto('query_outcomes')$q$));
END $$;

-- What adds rows to the hours. source: where they come from, and which.
CREATE OR REPLACE FUNCTION infaas_internal.add_outcomes(source text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $f$
SELECT format($s$INSERT INTO infaas_internal.query_hours AS known (%s)
  SELECT * FROM (%s) fresh ORDER BY hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline  -- no two writers in a circle
  ON CONFLICT (hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline) DO UPDATE SET %s,
    first = least(known.first, excluded.first), last = greatest(known.last, excluded.last)$s$, infaas_internal.sum_columns(),
  infaas_internal.outcome_sums($q$date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour$q$, source),
  (SELECT string_agg(format('%1$I = known.%1$I + excluded.%1$I', name), ', ')
   FROM unnest(ARRAY['queries', 'items', 'charged', 'asked', 'asked_items', 'outcomes', 'all_items', 'all_cost', 'accuracy_sum', 'accuracy_rows',
     'batch_sum', 'batch_rows', 'confidence_sum', 'confidence_rows', 'incomplete', 'simulated']) AS name))
$f$;

CREATE OR REPLACE VIEW infaas_internal.slo_minutely AS
SELECT minute, app, queries, good, late, refused, errors, p50_ms, p99_ms FROM infaas_internal.slo_minutes
UNION ALL
SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00'), app, count(*),
       count(*) FILTER (WHERE outcome IN ('ok', 'default')), count(*) FILTER (WHERE outcome = 'late'),
       count(*) FILTER (WHERE outcome = 'refused'), count(*) FILTER (WHERE outcome = 'error'),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')),
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default'))
FROM infaas.query_outcomes
WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL AND time >= infaas_internal.upto('query_outcomes')
GROUP BY 1, 2;

-- ---- rows that are older than the watermark when they come

CREATE OR REPLACE FUNCTION infaas_internal.late_cost_events() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE mark timestamptz;
BEGIN
  SELECT upto INTO mark FROM infaas_internal.watermarks WHERE source = 'cost_events' FOR SHARE;
  IF (SELECT min(time) FROM added) < mark THEN
    INSERT INTO infaas_internal.cost_hours AS known
    SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00'), app, model, variant, hardware, simulated,
           sum(cost), sum(seconds), sum(busy_seconds)
    FROM added WHERE time < mark
    GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6  -- two writers never wait for each other in a circle
    ON CONFLICT (hour, app, model, variant, hardware, simulated) DO UPDATE SET cost = known.cost + excluded.cost,
      seconds = known.seconds + excluded.seconds, busy_seconds = known.busy_seconds + excluded.busy_seconds;
  END IF;
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION infaas_internal.late_query_outcomes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE mark timestamptz;
BEGIN
  SELECT upto INTO mark FROM infaas_internal.watermarks WHERE source = 'query_outcomes' FOR SHARE;
  IF (SELECT min(time) FROM added) < mark THEN
    EXECUTE infaas_internal.add_outcomes('added WHERE time < $1') USING mark;
    INSERT INTO infaas_internal.slo_minutes AS known (minute, app, queries, good, late, refused, errors, stale)
    SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00'), app, count(*),
           count(*) FILTER (WHERE outcome IN ('ok', 'default')), count(*) FILTER (WHERE outcome = 'late'),
           count(*) FILTER (WHERE outcome = 'refused'), count(*) FILTER (WHERE outcome = 'error'), true
    FROM added WHERE time < mark AND policy IS DISTINCT FROM 'offline' AND parent IS NULL
    GROUP BY 1, 2 ORDER BY 1, 2
    ON CONFLICT (minute, app) DO UPDATE SET queries = known.queries + excluded.queries, good = known.good + excluded.good,
      late = known.late + excluded.late, refused = known.refused + excluded.refused, errors = known.errors + excluded.errors,
      stale = true;
  END IF;
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER late AFTER INSERT ON infaas.cost_events
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION infaas_internal.late_cost_events();
CREATE OR REPLACE TRIGGER late AFTER INSERT ON infaas.query_outcomes
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION infaas_internal.late_query_outcomes();

-- ---- moving the watermark: a piece at a time, while writers wait; true: there is more

-- Where a piece ends that begins with the first row from a time on: five minutes later, or with 20,000 rows if that is later still. So few
-- rows over a long time, as a year that is imported, are few pieces. At most `aim`, also without rows.
CREATE OR REPLACE FUNCTION infaas_internal.piece(of text, since timestamptz, aim timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  until timestamptz;
BEGIN
  EXECUTE format('SELECT min(time) + interval ''5 minutes'' FROM infaas.%I WHERE time >= $1', of) INTO until USING since;
  IF until < aim THEN
    EXECUTE format('SELECT greatest($2, max(time)) FROM (SELECT time FROM infaas.%I WHERE time >= $1 ORDER BY time LIMIT 20000) rows', of)
    INTO until USING since, until;
  END IF;
  RETURN least(until, aim);
END $$;

-- Only as far as rows have come: after a time without any, what was held back meanwhile is not late.
CREATE OR REPLACE FUNCTION infaas_internal.refresh_cost_events() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  mark timestamptz;
  aim timestamptz;
  until timestamptz;
BEGIN
  SELECT upto INTO mark FROM infaas_internal.watermarks WHERE source = 'cost_events' FOR UPDATE;
  SELECT date_bin('1 minute', least(max(time), now()) - interval '2 minutes', '2000-01-03 00:00:00+00') INTO aim FROM infaas.cost_events;
  until := date_bin('1 minute', infaas_internal.piece('cost_events', mark, aim), '2000-01-03 00:00:00+00');
  IF until IS NULL OR until <= mark THEN
    RETURN false;
  END IF;
  INSERT INTO infaas_internal.cost_hours AS known
  SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00'), app, model, variant, hardware, simulated,
         sum(cost), sum(seconds), sum(busy_seconds)
  FROM infaas.cost_events WHERE time >= mark AND time < until
  GROUP BY 1, 2, 3, 4, 5, 6
  ON CONFLICT (hour, app, model, variant, hardware, simulated) DO UPDATE SET cost = known.cost + excluded.cost,
    seconds = known.seconds + excluded.seconds, busy_seconds = known.busy_seconds + excluded.busy_seconds;
  UPDATE infaas_internal.watermarks SET upto = until WHERE source = 'cost_events';
  RETURN until < aim;
END $$;

CREATE OR REPLACE FUNCTION infaas_internal.refresh_query_outcomes() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  mark timestamptz;
  least_raw timestamptz;
  aim timestamptz;
  until timestamptz;
  stale_minute timestamptz;
BEGIN
  SELECT upto, floor INTO mark, least_raw FROM infaas_internal.watermarks WHERE source = 'query_outcomes' FOR UPDATE;
  FOR stale_minute IN
    SELECT DISTINCT minute FROM infaas_internal.slo_minutes WHERE stale AND minute >= least_raw ORDER BY 1 LIMIT 60
  LOOP
    UPDATE infaas_internal.slo_minutes known SET p50_ms = fresh.p50_ms, p99_ms = fresh.p99_ms
    FROM (
      SELECT app,
             percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p50_ms,
             percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p99_ms
      FROM infaas.query_outcomes
      WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL AND time >= stale_minute AND time < stale_minute + interval '1 minute'
      GROUP BY app
    ) fresh
    WHERE known.minute = stale_minute AND known.app = fresh.app AND known.stale;
    UPDATE infaas_internal.slo_minutes SET stale = false WHERE minute = stale_minute AND stale;
  END LOOP;
  UPDATE infaas_internal.slo_minutes SET stale = false WHERE stale AND minute < least_raw;  -- as good as it gets
  SELECT date_bin('1 minute', least(max(time), now()) - interval '2 minutes', '2000-01-03 00:00:00+00') INTO aim FROM infaas.query_outcomes;
  until := date_bin('1 minute', infaas_internal.piece('query_outcomes', mark, aim), '2000-01-03 00:00:00+00');
  IF until IS NULL OR until <= mark THEN
    RETURN EXISTS (SELECT FROM infaas_internal.slo_minutes WHERE stale);
  END IF;
  EXECUTE infaas_internal.add_outcomes('infaas.query_outcomes WHERE time >= $1 AND time < $2') USING mark, until;
  INSERT INTO infaas_internal.slo_minutes (minute, app, queries, good, late, refused, errors, p50_ms, p99_ms)
  SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00'), app, count(*),
         count(*) FILTER (WHERE outcome IN ('ok', 'default')), count(*) FILTER (WHERE outcome = 'late'),
         count(*) FILTER (WHERE outcome = 'refused'), count(*) FILTER (WHERE outcome = 'error'),
         percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')),
         percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default'))
  FROM infaas.query_outcomes
  WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL AND time >= mark AND time < until
  GROUP BY 1, 2;
  UPDATE infaas_internal.watermarks SET upto = until WHERE source = 'query_outcomes';
  RETURN until < aim;
END $$;

-- ---- raw rows that are old enough go, a piece of a relation at a time, and only once they are in the stores

-- Until when raw rows of a relation may go now: by whole hours, and a source's no further than its floor, which moves there.
-- NULL: none may. Minutes of SLOs, which are no raw rows, are gone with this.
CREATE OR REPLACE FUNCTION infaas_internal.cutoff(of text) RETURNS timestamptz
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  aged timestamptz;
  mark timestamptz;
BEGIN
  SELECT date_bin('1 hour', now() - keep, '2000-01-03 00:00:00+00') INTO aged
  FROM infaas_internal.retention WHERE relation = of;
  IF of = 'slo_by_app_minutely' THEN
    DELETE FROM infaas_internal.slo_minutes WHERE minute < aged;
    RETURN NULL;
  END IF;
  IF aged IS NULL THEN  -- kept for ever; least() would take the watermark alone
    RETURN NULL;
  END IF;
  UPDATE infaas_internal.watermarks
  SET floor = greatest(floor, least(aged, date_bin('1 hour', upto, '2000-01-03 00:00:00+00')))
  WHERE source = of RETURNING floor INTO mark;
  RETURN coalesce(mark, aged);
END $$;

CREATE OR REPLACE FUNCTION infaas_internal.expire(of text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  cutoff timestamptz := infaas_internal.cutoff(of);
  until timestamptz;
BEGIN
  IF cutoff IS NULL THEN
    RETURN false;
  END IF;
  until := infaas_internal.piece(of, '-infinity', cutoff);
  EXECUTE format('DELETE FROM infaas.%I WHERE time < $1', of) USING until;
  RETURN until < cutoff;
END $$;
