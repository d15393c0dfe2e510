-- What is added up of outcomes, said once for all who add: the stores and their late rows (rollups.sql), continuous aggregates
-- (aggregates.sql) and the edges of a range (views.sql). Carried out by every `prepare`, before those.

-- A SELECT. bucket: what time becomes, with its name; source: where rows come from, and which.
CREATE OR REPLACE FUNCTION infaas_internal.outcome_sums(bucket text, source text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $f$
SELECT 'SELECT ' || bucket || $s$, app, model, variant, hardware,
  count(*) FILTER (WHERE parent IS NULL) AS queries, coalesce(sum(items) FILTER (WHERE parent IS NULL), 0)::bigint AS items,
  coalesce(sum(cost) FILTER (WHERE parent IS NULL), 0) AS charged, count(*) FILTER (WHERE missing IS NULL) AS asked,
  coalesce(sum(items) FILTER (WHERE missing IS NULL AND NOT cached), 0)::bigint AS asked_items,
  payer, outcome, code, stage, parent IS NOT NULL AS part, missing IS NOT NULL AS together, coalesce(policy = 'offline', false) AS offline,
  count(*) AS outcomes, sum(items)::bigint AS all_items, sum(cost) AS all_cost,
  coalesce(sum(accuracy), 0) AS accuracy_sum, count(accuracy) AS accuracy_rows,
  coalesce(sum(batch), 0)::bigint AS batch_sum, count(batch) AS batch_rows,
  coalesce(sum(confidence), 0) AS confidence_sum, count(confidence) AS confidence_rows,
  count(*) FILTER (WHERE missing > 0) AS incomplete, count(*) FILTER (WHERE simulated) AS simulated, min(time) AS first, max(time) AS last
FROM $s$ || source || $s$
GROUP BY 1, app, model, variant, hardware, payer, outcome, code, stage, part, together, offline$s$
$f$;

-- The same of such sums. source: a relation with a row for each bucket.
CREATE OR REPLACE FUNCTION infaas_internal.sums_of_sums(bucket text, source text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $f$
SELECT 'SELECT ' || bucket || $s$, app, model, variant, hardware,
  sum(queries)::bigint AS queries, sum(items)::bigint AS items, sum(charged) AS charged, sum(asked)::bigint AS asked,
  sum(asked_items)::bigint AS asked_items, payer, outcome, code, stage, part, together, offline,
  sum(outcomes)::bigint AS outcomes, sum(all_items)::bigint AS all_items, sum(all_cost) AS all_cost,
  sum(accuracy_sum) AS accuracy_sum, sum(accuracy_rows)::bigint AS accuracy_rows, sum(batch_sum)::bigint AS batch_sum,
  sum(batch_rows)::bigint AS batch_rows, sum(confidence_sum) AS confidence_sum, sum(confidence_rows)::bigint AS confidence_rows,
  sum(incomplete)::bigint AS incomplete, sum(simulated)::bigint AS simulated, min(first) AS first, max(last) AS last
FROM $s$ || source || $s$
GROUP BY 1, app, model, variant, hardware, payer, outcome, code, stage, part, together, offline$s$
$f$;

CREATE OR REPLACE FUNCTION infaas_internal.sum_columns() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $f$
SELECT $s$hour, app, model, variant, hardware, queries, items, charged, asked, asked_items, payer, outcome, code, stage, part, together, offline,
  outcomes, all_items, all_cost, accuracy_sum, accuracy_rows, batch_sum, batch_rows, confidence_sum, confidence_rows, incomplete, simulated,
  first, last$s$
$f$;
