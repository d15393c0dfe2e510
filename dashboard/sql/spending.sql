-- What is being spent a second: each machine's last account (there is one every 10 s, in which an instance may have been for a part only).
SELECT app, hardware, simulated, sum(cost / nullif(period, 0)) AS per_second
FROM (
  SELECT *, max(time) OVER (PARTITION BY worker) AS last, max(seconds) OVER (PARTITION BY worker, time) AS period
  FROM infaas.cost_events WHERE time > now() - interval '40 seconds'
) recent
WHERE time = last
GROUP BY app, hardware, simulated
