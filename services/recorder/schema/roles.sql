-- Who may do what; carried out after every migration, so that new relations are covered. The grants are the limit; the
-- settings of the reading role (read only, time-outs) are guard rails that a session may move.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
REVOKE ALL ON SCHEMA infaas, infaas_internal FROM PUBLIC;

-- Anybody may make large objects and fill the disk with sorted rows, unless told otherwise; only a superuser can tell.
DO $$
BEGIN
  IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
    REVOKE EXECUTE ON FUNCTION lo_creat(integer), lo_create(oid), lo_from_bytea(oid, bytea) FROM PUBLIC;
    ALTER ROLE infaas_reader SET temp_file_limit = '1GB';
    IF NOT current_setting('wal_recycle')::boolean AND current_setting('server_version_num')::integer >= 170000 THEN
      -- `infaas up`: what a large file has taken is given back when it is deleted
      GRANT pg_checkpoint TO infaas_writer;
      GRANT MAINTAIN ON infaas_internal.files TO infaas_writer;
    END IF;
  END IF;
END $$;

GRANT USAGE ON SCHEMA infaas TO infaas_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA infaas TO infaas_reader;

GRANT USAGE ON SCHEMA infaas, infaas_internal TO infaas_writer;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA infaas, infaas_internal TO infaas_writer;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA infaas_internal TO infaas_writer;
