-- TimescaleDB's policies, made anew by every `prepare`, since settings may have changed (infaas_internal.retention).
--
-- A refresh reaches back as far as raw rows are kept, less a day: what is older than its start and was not refreshed before
-- would vanish from the aggregates, and a refresh of what has been dropped would empty them.
DO $$
DECLARE
  entry record;
BEGIN
  FOR entry IN
    SELECT r.relation, r.keep, w.compress, w.segment, w.orders, w.policy
    FROM infaas_internal.retention r JOIN (VALUES
      ('query_outcomes', interval '7 days', 'app', 'time DESC, uid', false),
      ('cost_events', interval '7 days', 'app', 'time DESC', false),
      ('worker_samples', interval '2 days', 'worker, device', 'time DESC', true),
      ('instance_samples', interval '2 days', 'worker', 'time DESC', true),
      ('state_events', interval '14 days', 'worker', 'time DESC', true),
      ('scaling_events', interval '14 days', 'scaler', 'time DESC', true),
      ('shadow_events', interval '14 days', 'policy', 'time DESC', true),
      ('worker_events', interval '14 days', 'worker', 'time DESC', true),
      ('objective_events', interval '14 days', 'app', 'time DESC', true),
      ('selection_events', interval '14 days', 'app', 'time DESC', true),
      ('pipeline_events', interval '14 days', 'pipeline', 'time DESC', true),
      ('client_errors', interval '14 days', 'code', 'time DESC', true)
    ) AS w (relation, compress, segment, orders, policy) USING (relation)
  LOOP
    IF NOT (SELECT compression_enabled FROM timescaledb_information.hypertables
            WHERE hypertable_schema = 'infaas' AND hypertable_name = entry.relation) THEN
      EXECUTE format(
        'ALTER TABLE infaas.%I SET (timescaledb.compress, timescaledb.compress_segmentby = %L, timescaledb.compress_orderby = %L)',
        entry.relation, entry.segment, entry.orders
      );
    END IF;
    PERFORM remove_compression_policy(format('infaas.%I', entry.relation)::regclass, if_exists => true);
    PERFORM remove_retention_policy(format('infaas.%I', entry.relation)::regclass, if_exists => true);
    IF entry.keep IS NULL OR entry.keep > entry.compress THEN
      PERFORM add_compression_policy(format('infaas.%I', entry.relation)::regclass, compress_after => entry.compress);
    END IF;
    IF entry.policy AND entry.keep IS NOT NULL THEN
      PERFORM add_retention_policy(format('infaas.%I', entry.relation)::regclass, drop_after => entry.keep);
    END IF;
  END LOOP;

  FOR entry IN
    SELECT w.aggregate, r.keep - interval '1 day' AS reach
    FROM (VALUES
      ('cost_minute', 'cost_events'), ('cost_hour', 'cost_events'),
      ('query_minute', 'query_outcomes'), ('query_hour', 'query_outcomes'), ('slo_minute', 'query_outcomes')
    ) AS w (aggregate, source)
    JOIN infaas_internal.retention r ON r.relation = w.source
  LOOP
    PERFORM remove_continuous_aggregate_policy(format('infaas_internal.%I', entry.aggregate)::regclass, if_exists => true);
    PERFORM add_continuous_aggregate_policy(
      format('infaas_internal.%I', entry.aggregate)::regclass,
      start_offset => entry.reach, end_offset => interval '2 minutes', schedule_interval => interval '1 minute'
    );
  END LOOP;

  PERFORM remove_retention_policy('infaas_internal.slo_minute', if_exists => true);
  SELECT keep INTO entry FROM infaas_internal.retention WHERE relation = 'slo_by_app_minutely';
  IF entry.keep IS NOT NULL THEN
    PERFORM add_retention_policy('infaas_internal.slo_minute', drop_after => entry.keep);
  END IF;

  IF NOT EXISTS (SELECT FROM timescaledb_information.jobs WHERE proc_schema = 'infaas_internal' AND proc_name = 'expire_aggregated') THEN
    PERFORM add_job('infaas_internal.expire_aggregated', '1 hour');
  END IF;
END $$;
