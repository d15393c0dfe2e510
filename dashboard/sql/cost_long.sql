-- What was spent, by bucket and by whom, from the hours. Of what nobody used nobody noted whether it was simulated: a kind of
-- hardware counts as simulated here when all of its variants are.
SELECT date_bin(%(step)s, c.hour, %(start)s) AS time, c.app, c.model, c.variant, c.hardware,
       coalesce(bool_and(v.simulated), false) AS simulated, sum(c.cost) AS cost
FROM infaas.cost_by_variant_hourly c
LEFT JOIN (
  SELECT variant, hardware, bool_and(simulated) AS simulated FROM infaas.variants GROUP BY GROUPING SETS ((variant, hardware), (hardware))
) v ON v.hardware = c.hardware AND v.variant IS NOT DISTINCT FROM c.variant
WHERE c.hour >= %(start)s AND c.hour < %(end)s
GROUP BY 1, 2, 3, 4, 5
HAVING sum(c.cost) > 0 -- not what was refused, which has no hardware
ORDER BY 1
