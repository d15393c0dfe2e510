-- With TimescaleDB under its Apache licence: as rollups.sql has it, but old rows go by the chunk.
DO $$
BEGIN
  EXECUTE format($body$
    CREATE OR REPLACE FUNCTION infaas_internal.expire(of text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, %I, pg_temp AS $expire$
    DECLARE cutoff timestamptz := infaas_internal.cutoff(of);
    BEGIN
      IF cutoff > '-infinity' THEN
        PERFORM drop_chunks(format('infaas.%%I', of)::regclass, older_than => cutoff);
      END IF;
      RETURN false;
    END $expire$
  $body$, (SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'timescaledb'));
END $$;
