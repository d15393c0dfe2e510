-- With TimescaleDB under its Apache licence: as rollups.sql has it, but old rows go by the chunk.
DO $$
BEGIN
  EXECUTE format($body$
    CREATE OR REPLACE FUNCTION infaas_internal.expire(of text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, %I, pg_temp AS $expire$
    DECLARE cutoff timestamptz;
    BEGIN
      SELECT date_bin('1 hour', now() - keep, '2000-01-03 00:00:00+00') INTO cutoff
      FROM infaas_internal.retention WHERE relation = of;
      IF of = 'slo_by_app_minutely' THEN
        DELETE FROM infaas_internal.slo_minutes WHERE minute < cutoff;
        RETURN false;
      END IF;
      IF EXISTS (SELECT FROM infaas_internal.watermarks WHERE source = of) THEN
        UPDATE infaas_internal.watermarks
        SET floor = greatest(floor, least(cutoff, date_bin('1 hour', upto, '2000-01-03 00:00:00+00')))
        WHERE source = of RETURNING floor INTO cutoff;
      END IF;
      IF cutoff > '-infinity' THEN
        PERFORM drop_chunks(format('infaas.%%I', of)::regclass, older_than => cutoff);
      END IF;
      RETURN false;
    END $expire$
  $body$, (SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'timescaledb'));
END $$;
