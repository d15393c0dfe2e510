-- What is being spent a second: each machine's last account (there is one every 10 s).
SELECT app, hardware, simulated, sum(cost / nullif(seconds, 0)) AS per_second
FROM (
  SELECT *, max(time) OVER (PARTITION BY worker) AS last FROM infaas.cost_events WHERE time > now() - interval '40 seconds'
) recent
WHERE time = last
GROUP BY app, hardware, simulated
