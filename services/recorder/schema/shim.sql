-- time_bucket as TimescaleDB has it, where the extension is not there: what people ask runs on both. Never beside the extension,
-- some of whose versions fail then. Not STRICT, which would keep the planner from inlining the body.
CREATE OR REPLACE FUNCTION infaas.time_bucket(bucket_width interval, ts timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN extract(year FROM bucket_width) = 0 AND extract(month FROM bucket_width) = 0
    THEN date_bin(bucket_width, ts, timestamptz '2000-01-03 00:00:00+00')
    ELSE (timestamp '2000-01-01' + make_interval(months => (
      floor(((extract(year FROM ts AT TIME ZONE 'UTC') - 2000) * 12 + extract(month FROM ts AT TIME ZONE 'UTC') - 1)
            / (extract(year FROM bucket_width) * 12 + extract(month FROM bucket_width)))
      * (extract(year FROM bucket_width) * 12 + extract(month FROM bucket_width))
    )::integer)) AT TIME ZONE 'UTC' END
$$;
CREATE OR REPLACE FUNCTION infaas.time_bucket(bucket_width interval, ts timestamptz, timezone text) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT infaas.time_bucket(bucket_width, ts AT TIME ZONE timezone AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AT TIME ZONE timezone
$$;
