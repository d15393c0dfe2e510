-- What was spent, by bucket and by whom; app null: the part of machines that nobody used.
SELECT date_bin(%(step)s, time, %(start)s) AS time, app, model, variant, hardware, simulated,
       sum(cost) AS cost, sum(busy_seconds) AS busy_seconds, sum(seconds) AS seconds
FROM infaas.cost_events
WHERE time >= %(start)s AND time < %(end)s
GROUP BY 1, 2, 3, 4, 5, 6
ORDER BY 1
