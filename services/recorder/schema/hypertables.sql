-- With TimescaleDB under either licence: events in chunks of time. Carried out by every `prepare`, in its search_path the
-- extension's schema. Rows that are there move into the chunks.
DROP FUNCTION IF EXISTS infaas.time_bucket(interval, timestamptz), infaas.time_bucket(interval, timestamptz, text);

DO $$
DECLARE entry record;
BEGIN
  FOR entry IN
    SELECT * FROM (VALUES
      ('query_outcomes', interval '1 day'), ('cost_events', interval '1 day'), ('worker_samples', interval '1 day'),
      ('instance_samples', interval '1 day'), ('state_events', interval '7 days'), ('scaling_events', interval '7 days'),
      ('worker_events', interval '7 days'), ('shadow_events', interval '7 days'), ('objective_events', interval '7 days'),
      ('selection_events', interval '7 days'), ('pipeline_events', interval '7 days'), ('client_errors', interval '7 days')
    ) AS wanted (relation, chunk)
    WHERE NOT EXISTS (
      SELECT FROM timescaledb_information.hypertables h
      WHERE h.hypertable_schema = 'infaas' AND h.hypertable_name = wanted.relation
    )
  LOOP
    PERFORM create_hypertable(
      format('infaas.%I', entry.relation)::regclass, by_range('time', entry.chunk),
      migrate_data => true, create_default_indexes => false
    );
  END LOOP;
END $$;

-- Only young chunks are searched: a query is sent again within seconds.
CREATE OR REPLACE FUNCTION infaas_internal.known_uids(uids uuid[], earliest timestamptz) RETURNS SETOF uuid
LANGUAGE sql STABLE
AS $$ SELECT uid FROM infaas.query_outcomes WHERE uid = ANY (uids) AND time > earliest - interval '1 hour' $$;
