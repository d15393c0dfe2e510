-- What needs attention, as far as events tell it; the thresholds are those of ops/prometheus/infaas.rules.yml. amount: see each line.
WITH recent AS (
  SELECT app, count(*) AS queries, count(*) FILTER (WHERE outcome = 'ok') AS good
  FROM infaas.query_outcomes
  WHERE time > now() - interval '5 minutes' AND parent IS NULL AND policy IS DISTINCT FROM 'offline' AND outcome <> 'cancelled'
  GROUP BY app
), devices AS (
  SELECT worker, device, max(time) AS last FROM infaas.worker_samples
  WHERE time > now() - interval '10 minutes' GROUP BY worker, device
), workers AS (
  SELECT DISTINCT ON (worker) worker, to_state AS state, time, reason FROM infaas.worker_events ORDER BY worker, time DESC
)
-- share of queries in time
SELECT CASE WHEN good < 0.5 * queries THEN 'missed badly' ELSE 'missed' END AS what, app AS name, good::double precision / queries AS amount
FROM recent WHERE queries > 30 AND good < 0.95 * queries
UNION ALL -- share of answers that lack the model
SELECT 'member missing', part.app || ' / ' || part.stage, avg((part.outcome NOT IN ('ok', 'late'))::int)
FROM infaas.query_outcomes query JOIN infaas.query_outcomes part ON part.parent = query.uid AND part.app = query.app
WHERE query.time > now() - interval '5 minutes' AND part.time > now() - interval '6 minutes' AND query.missing IS NOT NULL
  AND query.outcome <> 'cancelled'
GROUP BY part.app, part.stage HAVING count(*) > 30 AND avg((part.outcome NOT IN ('ok', 'late'))::int) > 0.1
UNION ALL -- seconds since the last sample
SELECT 'device silent', d.worker || ' ' || d.device, extract(epoch FROM now() - d.last)
FROM devices d JOIN workers w USING (worker)
WHERE d.last < now() - interval '30 seconds' AND w.state IN ('Ready', 'Draining')
UNION ALL -- seconds since then
SELECT 'worker failed', worker, extract(epoch FROM now() - time) FROM workers
WHERE state = 'Failed' AND time > now() - interval '1 hour'
UNION ALL -- instances
SELECT 'in trouble', variant, count(DISTINCT instance) FROM infaas.variant_states
WHERE state IN ('Overloaded', 'Interfered') AND since < now() - interval '1 minute' GROUP BY variant
UNION ALL -- columns
SELECT 'drifted', app, count(*) FROM infaas.drift_events WHERE ended IS NULL GROUP BY app
UNION ALL -- events
SELECT 'rejected events', '', count(*) FROM infaas.rejected_events HAVING count(*) > 0
UNION ALL -- jobs of the last day
SELECT 'failed jobs', '', count(*) FROM infaas.jobs WHERE state = 'failed' AND updated > now() - interval '1 day' HAVING count(*) > 0
UNION ALL -- registrations of the last day
SELECT 'failed registrations', '', count(*) FROM infaas.registrations
WHERE state = 'failed' AND updated > now() - interval '1 day' HAVING count(*) > 0
ORDER BY what, name
