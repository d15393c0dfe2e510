-- Runs of policies beside the system, and the system itself in the same time. Shares are those that `infaas shadow` prints.
SELECT s.policy, s.since, s.until, s.cost_rate, s.apps_cost_rate, s.actions, s.reached,
       substring(s.reached FROM '^([0-9.]+)%%')::float8 / 100 AS attainment,
       3600 * c.cost / nullif(s.seconds, 0) AS real_cost_rate, 3600 * c.apps_cost / nullif(s.seconds, 0) AS real_apps_cost_rate,
       a.actions AS real_actions, substring(s.reached FROM 'the system: ([0-9.]+)%%')::float8 / 100 AS real_attainment
FROM (
  SELECT policy, min(time) AS since, max(time) AS until, extract(epoch FROM max(time) - min(time))::float8 AS seconds,
         avg(cost_rate) AS cost_rate, avg(apps_cost_rate) AS apps_cost_rate,
         count(*) FILTER (WHERE action <> 'sample' AND count > 0) AS actions,
         (array_agg(reason ORDER BY time DESC) FILTER (WHERE action = 'sample'))[1] AS reached
  FROM (
    SELECT *, count(*) FILTER (WHERE begins) OVER (PARTITION BY policy ORDER BY time) AS run
    FROM (
      SELECT *, time - lag(time) OVER (PARTITION BY policy ORDER BY time) > interval '30 s' AS begins  -- samples come every 10 s
      FROM infaas.shadow_events
      WHERE time >= %(start)s AND time < %(end)s AND policy <> 'oracle'
    ) marked
  ) numbered
  GROUP BY policy, run
) s
CROSS JOIN LATERAL (
  SELECT sum(cost) AS cost, sum(cost) FILTER (WHERE app IS NOT NULL) AS apps_cost
  FROM infaas.cost_events WHERE time > s.since AND time <= s.until
) c
CROSS JOIN LATERAL (
  SELECT count(*) AS actions FROM infaas.scaling_events WHERE time >= s.since AND time <= s.until AND count > 0
) a
ORDER BY s.until DESC, s.policy
