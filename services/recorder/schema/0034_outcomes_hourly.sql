-- The hours tell how queries ended, so that nobody counts the rows of a month: more of the key, and sums of what pages ask for. Null
-- (outcome): hours whose rows were gone when this came; only their older sums are known.
ALTER TABLE infaas_internal.query_hours
  ADD COLUMN outcome  text,
  ADD COLUMN code     text,
  ADD COLUMN stage    text,
  ADD COLUMN part     boolean,  -- has a parent
  ADD COLUMN together boolean,  -- several were asked for it (`missing` is known)
  ADD COLUMN offline  boolean,
  ADD COLUMN outcomes        bigint NOT NULL DEFAULT 0,  -- from here on: sums of all rows, none left out
  ADD COLUMN all_items       bigint NOT NULL DEFAULT 0,
  ADD COLUMN all_cost        double precision NOT NULL DEFAULT 0,
  ADD COLUMN accuracy_sum    double precision NOT NULL DEFAULT 0,
  ADD COLUMN accuracy_rows   bigint NOT NULL DEFAULT 0,
  ADD COLUMN batch_sum       bigint NOT NULL DEFAULT 0,
  ADD COLUMN batch_rows      bigint NOT NULL DEFAULT 0,
  ADD COLUMN confidence_sum  double precision NOT NULL DEFAULT 0,
  ADD COLUMN confidence_rows bigint NOT NULL DEFAULT 0,
  ADD COLUMN incomplete      bigint NOT NULL DEFAULT 0,
  ADD COLUMN simulated       bigint NOT NULL DEFAULT 0,
  ADD COLUMN first           timestamptz,
  ADD COLUMN last            timestamptz;
DROP INDEX infaas_internal.query_hours_key;
CREATE UNIQUE INDEX query_hours_key ON infaas_internal.query_hours
  (hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline) NULLS NOT DISTINCT;

-- Hours whose raw rows are all there are added up again, as any backlog is. With continuous aggregates, aggregates.sql sees to it.
DO $$
DECLARE since timestamptz;
BEGIN
  IF to_regclass('infaas_internal.query_hour') IS NOT NULL THEN
    RETURN;
  END IF;
  LOCK TABLE infaas.query_outcomes IN ACCESS EXCLUSIVE MODE;
  SELECT greatest(floor, date_bin('1 hour', (SELECT min(time) FROM infaas.query_outcomes), '2000-01-03 00:00:00+00')) INTO since
  FROM infaas_internal.watermarks WHERE source = 'query_outcomes' AND EXISTS (SELECT FROM infaas.query_outcomes);
  DELETE FROM infaas_internal.query_hours WHERE hour >= since;
  DELETE FROM infaas_internal.slo_minutes WHERE minute >= since;
  UPDATE infaas_internal.watermarks SET upto = since WHERE source = 'query_outcomes' AND upto > since;
END $$;
