-- Questions to a system's history (docs/sql.md). Each stands alone: paste one into `infaas sql`, or run all of them with `psql URL -f questions.sql`,
-- where URL is the `sql` that `infaas up` prints.

-- What did the autoscalers expect, and what had they ready for it?
SELECT time, app, slo_target, reached, load, forecast, capacity, headroom
FROM objective_events
WHERE time > now() - interval '15 minutes'
ORDER BY time DESC, app;

-- What do clients do wrong?
SELECT app, code, sum(count) AS queries, max(time) AS last
FROM client_errors
WHERE time > now() - interval '1 day'
GROUP BY app, code
ORDER BY queries DESC;

-- What answered for each requirement, how well, at what price?
SELECT app, slo_ms, accuracy_required, variant, count(*) AS queries, avg(accuracy) AS accuracy,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) AS p99_ms, 1000 * sum(cost) / sum(items) AS cost_per_1000
FROM query_outcomes
WHERE outcome IN ('ok', 'late') AND missing IS NULL AND time > now() - interval '1 hour'
GROUP BY app, slo_ms, accuracy_required, variant
ORDER BY app, slo_ms, queries DESC;

-- Which batch sizes are formed, and what do they do to latency?
SELECT variant, width_bucket(batch, ARRAY[1, 2, 4, 8, 16, 32, 64]) AS bucket, min(batch) AS least, max(batch) AS most,
       count(*) AS queries, avg(latency_ms) AS mean_ms
FROM query_outcomes
WHERE batch IS NOT NULL AND time > now() - interval '1 hour'
GROUP BY variant, bucket
ORDER BY variant, bucket;

-- How sure were the answers of several models, and how many members came too late for them?
SELECT date_trunc('minute', time) AS minute, app, count(*) AS queries, avg(confidence) AS confidence, avg(missing) AS missing,
       count(*) FILTER (WHERE outcome = 'default') AS defaults
FROM query_outcomes
WHERE missing IS NOT NULL AND time > now() - interval '1 hour'
GROUP BY minute, app
ORDER BY minute DESC, app;

-- What became of each member's part, where some were missing?
SELECT query.time, query.uid, query.missing, part.stage AS member, part.variant, part.outcome, part.code, part.latency_ms, query.latency_ms AS answered_ms
FROM query_outcomes query JOIN query_outcomes part ON part.parent = query.uid
WHERE query.missing > 0 AND query.time > now() - interval '1 hour' AND part.time > now() - interval '2 hours'
ORDER BY query.time DESC, member
LIMIT 50;

-- How often is each member wrong, and what does it weigh now?
SELECT app, context, member, count(*) AS feedbacks, avg(loss) AS error, (array_agg(weight ORDER BY time DESC))[1] AS weight
FROM selection_events
WHERE time > now() - interval '1 day'
GROUP BY app, context, member
ORDER BY app, context, weight DESC;

-- How does each pipeline do, and what does it cost?
SELECT minute, pipeline, queries, round(100 * attainment::numeric, 1) AS percent_in_time, p99_ms, slo_target, cost
FROM slo_by_pipeline_minutely
WHERE minute > now() - interval '15 minutes'
ORDER BY minute DESC, pipeline;

-- How did the replicas of pipelines follow their traffic, and why?
SELECT time, pipeline, action, lambda_max, window_s,
       string_agg(vertex || ' ' || from_replicas || ' -> ' || to_replicas, ', ' ORDER BY vertex) AS replicas, reason
FROM pipeline_events
WHERE time > now() - interval '1 day'
GROUP BY time, pipeline, action, lambda_max, window_s, reason
ORDER BY time DESC, pipeline;

-- Which variants are there, cheapest first, with what was measured?
SELECT app, variant, hardware, precision, accuracy, accuracy_low, accuracy_high, latency_ms, saturation_qps, load_ms, transfer_ms, memory_mb, cost_per_1000, state
FROM variants
WHERE NOT dominated
ORDER BY app, cost_per_1000;

-- How does a variant's latency grow with the batch?
SELECT variant, batch, length, p50_ms, p99_ms, p50_ms / batch AS ms_per_item
FROM profiles
ORDER BY variant, length, batch;

-- What did each app cost per day?
SELECT date_trunc('day', hour) AS day, coalesce(app, '(nobody)') AS app, sum(cost - simulated_cost) AS cost, sum(queries) AS queries,
       1000 * sum(cost - simulated_cost) / nullif(sum(queries), 0) AS cost_per_1000
FROM cost_by_app_hourly
WHERE hour > now() - interval '30 days'
GROUP BY day, app
ORDER BY day DESC, cost DESC;

-- What do 1,000 items cost on each variant, idle time of its instances included, and what would they cost if these were always
-- busy?
SELECT app, variant, hardware, sum(asked_items) AS items, sum(cost) AS cost, 1000 * sum(cost) / nullif(sum(asked_items), 0) AS cost_per_1000,
       1000 * sum(cost * busy_seconds / nullif(seconds, 0)) / nullif(sum(asked_items), 0) AS cost_per_1000_if_busy
FROM cost_by_variant_hourly
WHERE variant IS NOT NULL AND hour > now() - interval '7 days'
GROUP BY app, variant, hardware
ORDER BY cost DESC;

-- Which share of the bill is idle: paid for and used by nobody, or loaded and waiting?
SELECT date_trunc('day', hour) AS day, hardware, sum(cost) AS cost,
       sum(cost) FILTER (WHERE app IS NULL) / nullif(sum(cost), 0) AS nobodys,
       sum(cost * (1 - busy_seconds / nullif(seconds, 0))) FILTER (WHERE app IS NOT NULL) / nullif(sum(cost), 0) AS waiting
FROM cost_by_variant_hourly
WHERE hardware IS NOT NULL AND hour > now() - interval '30 days'
GROUP BY day, hardware
ORDER BY day DESC, cost DESC;

-- How does this week compare with the one before?
SELECT coalesce(app, '(nobody)') AS app,
       sum(cost - simulated_cost) FILTER (WHERE hour > now() - interval '7 days') AS this_week,
       sum(cost - simulated_cost) FILTER (WHERE hour <= now() - interval '7 days') AS the_week_before
FROM cost_by_app_hourly
WHERE hour > now() - interval '14 days'
GROUP BY app
ORDER BY this_week DESC NULLS LAST;

-- How were the objectives met, by the hour?
SELECT date_trunc('hour', minute) AS hour, app, sum(queries) AS queries, sum(late) AS late, sum(refused) AS refused,
       sum(errors) AS errors, sum(attainment * queries) / sum(queries) AS attainment, max(p99_ms) AS p99_ms_of_the_worst_minute
FROM slo_by_app_minutely
WHERE minute > now() - interval '1 day'
GROUP BY hour, app
ORDER BY hour DESC, app;

-- What would policies beside the system have paid today, and how often would they have acted?
SELECT policy, min(time) AS since, max(time) AS until, avg(cost_rate) FILTER (WHERE action = 'sample') AS machines_per_hour,
       avg(apps_cost_rate) FILTER (WHERE action = 'sample') AS instances_per_hour,
       count(*) FILTER (WHERE action <> 'sample' AND count > 0) AS actions
FROM shadow_events
WHERE time > now() - interval '1 day'
GROUP BY policy
ORDER BY machines_per_hour, instances_per_hour;

-- Which decisions to load something cost most, and was it used? What an instance costs counts for the last decision about its
-- variant on that worker.
SELECT decided.time, scaler, action, decided.variant, decided.worker, reason,
       sum(cost) AS cost_since, sum(busy_seconds) / sum(seconds) AS busy
FROM (
  SELECT *, lead(time, 1, 'infinity') OVER (PARTITION BY worker, variant ORDER BY time) AS until
  FROM scaling_events
  WHERE action IN ('load', 'replicate', 'upgrade', 'downgrade', 'migrate') AND time > now() - interval '1 day'
) decided
JOIN cost_events paid ON paid.variant = decided.variant AND paid.worker = decided.worker
  AND paid.time >= decided.time AND paid.time < decided.until
GROUP BY 1, 2, 3, 4, 5, 6
ORDER BY cost_since DESC
LIMIT 20;

-- What was upgraded or downgraded, and why?
SELECT time, app, action, variant, count, worker, reason, solver, solve_ms
FROM scaling_events
WHERE action IN ('upgrade', 'downgrade') AND time > now() - interval '1 day'
ORDER BY time DESC;

-- Which queries cost most, by what they asked for?
SELECT app, slo_ms, accuracy_required, variant, count(*) AS queries, sum(cost) AS cost, 1000 * sum(cost) / sum(items) AS cost_per_1000
FROM query_outcomes
WHERE parent IS NULL AND time > now() - interval '1 day'
GROUP BY app, slo_ms, accuracy_required, variant
ORDER BY cost DESC
LIMIT 20;

-- How well are the instances used that are paid for?
SELECT variant, hardware, sum(busy_seconds) / sum(seconds) AS busy, sum(cost) AS cost
FROM cost_events
WHERE variant IS NOT NULL AND time > now() - interval '1 day'
GROUP BY variant, hardware
ORDER BY cost DESC;

-- How long was each variant in trouble?
SELECT app, variant, instance, to_state AS state, sum(until - time) AS so_long, count(*) AS times
FROM (
  SELECT *, lead(time, 1, now()) OVER (PARTITION BY instance, app ORDER BY time) AS until
  FROM state_events
  WHERE time > now() - interval '1 day'
) spans
WHERE to_state IN ('Overloaded', 'Interfered')
GROUP BY app, variant, instance, to_state
ORDER BY so_long DESC;

-- How busy are the workers?
SELECT date_bin('1 minute', time, '2000-01-03Z') AS minute, worker, device,
       avg(utilisation) AS utilisation, max(memory_used_mb) AS memory_used_mb, avg(load) AS items_per_s, max(queue) AS queue
FROM worker_samples
WHERE time > now() - interval '15 minutes'
GROUP BY minute, worker, device
ORDER BY minute DESC, worker, device;

-- What did offline jobs do, and at what price?
SELECT job, app, state, done, total, reason, 1000 * cost / nullif(done, 0) AS cost_per_1000, finished - started AS took
FROM jobs
ORDER BY created DESC
LIMIT 20;

-- What became of registrations?
SELECT registration, app, model, version, state, progress, reason, updated - started AS took
FROM registrations
ORDER BY started DESC;

-- Was anything not written?
SELECT count(*) AS rejected, max(time) AS last, max(reason) AS for_example FROM rejected_events;
