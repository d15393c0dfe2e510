-- Offline jobs: items that could not be computed, what it cost so far, and when it began and ended.
ALTER TABLE infaas.jobs
  ADD COLUMN failed   bigint NOT NULL DEFAULT 0,
  ADD COLUMN cost     double precision NOT NULL DEFAULT 0,
  ADD COLUMN started  timestamptz,
  ADD COLUMN finished timestamptz;

-- attainment: the share of all queries that were answered in time; latencies of those that were answered at all. Offline work
-- has no objective: its queries wait for spare capacity and are left out.
CREATE OR REPLACE VIEW infaas.slo_by_app_minutely AS
SELECT date_bin('1 minute', time, '2000-01-03 00:00:00+00') AS minute, app,
       count(*) AS queries,
       count(*) FILTER (WHERE outcome = 'late') AS late,
       count(*) FILTER (WHERE outcome = 'refused') AS refused,
       count(*) FILTER (WHERE outcome = 'error') AS errors,
       (count(*) FILTER (WHERE outcome IN ('ok', 'default')))::double precision / count(*) AS attainment,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p99_ms
FROM infaas.query_outcomes
WHERE policy IS DISTINCT FROM 'offline'
GROUP BY 1, 2;
