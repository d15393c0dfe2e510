-- What clients did wrong, by the second: no outcome of any app, so it lowers no attainment and makes no app appear. The recorder writes it.
-- app: what was asked for, at most 64 characters; null: nothing was, or too many different names that do not exist in that minute.
CREATE TABLE infaas.client_errors (
  time  timestamptz NOT NULL,
  app   text,
  code  text NOT NULL,
  count bigint NOT NULL
);
CREATE INDEX client_errors_time ON infaas.client_errors (time DESC);

-- Those of before move here, and leave the rollups, where these are stores. With continuous aggregates they stay until they expire:
-- their rows may be compressed.
DO $$
DECLARE mark timestamptz;
BEGIN
  IF to_regclass('infaas_internal.query_hour') IS NOT NULL THEN
    RETURN;
  END IF;
  LOCK TABLE infaas.query_outcomes IN ACCESS EXCLUSIVE MODE;
  SELECT upto INTO mark FROM infaas_internal.watermarks WHERE source = 'query_outcomes' FOR UPDATE;
  CREATE TEMPORARY TABLE mistakes ON COMMIT DROP AS
  SELECT time, app, model, variant, hardware, outcome, code, items, missing, cached, cost FROM infaas.query_outcomes
  WHERE code IN ('bad_request', 'unknown_app', 'unknown_model') AND outcome IN ('refused', 'error') AND parent IS NULL
    AND policy IS DISTINCT FROM 'offline';
  INSERT INTO infaas.client_errors
  SELECT date_trunc('second', time), nullif(left(app, 64), '_'), code, count(*) FROM mistakes GROUP BY 1, 2, 3;
  UPDATE infaas_internal.slo_minutes known
  SET queries = known.queries - m.queries, refused = known.refused - m.refused, errors = known.errors - m.errors
  FROM (
    SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00') AS minute, app, count(*) AS queries,
           count(*) FILTER (WHERE outcome = 'refused') AS refused, count(*) FILTER (WHERE outcome = 'error') AS errors
    FROM mistakes WHERE time < mark GROUP BY 1, 2
  ) m WHERE known.minute = m.minute AND known.app = m.app;
  DELETE FROM infaas_internal.slo_minutes WHERE queries <= 0;
  UPDATE infaas_internal.query_hours known
  SET queries = known.queries - m.queries, items = known.items - m.items, charged = known.charged - m.charged,
      asked = known.asked - m.asked, asked_items = known.asked_items - m.asked_items
  FROM (
    SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour, app, model, variant, hardware, count(*) AS queries,
           sum(items)::bigint AS items, sum(cost) AS charged, count(*) FILTER (WHERE missing IS NULL) AS asked,
           coalesce(sum(items) FILTER (WHERE missing IS NULL AND NOT cached), 0)::bigint AS asked_items
    FROM mistakes WHERE time < mark GROUP BY 1, 2, 3, 4, 5
  ) m WHERE known.hour = m.hour AND known.app = m.app AND known.model IS NOT DISTINCT FROM m.model
    AND known.variant IS NOT DISTINCT FROM m.variant AND known.hardware IS NOT DISTINCT FROM m.hardware;
  DELETE FROM infaas_internal.query_hours WHERE queries <= 0 AND asked <= 0;
  DELETE FROM infaas.query_outcomes
  WHERE code IN ('bad_request', 'unknown_app', 'unknown_model') AND outcome IN ('refused', 'error') AND parent IS NULL
    AND policy IS DISTINCT FROM 'offline';
END $$;
