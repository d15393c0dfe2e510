-- What the fleets of policies beside the system would cost, by bucket. US$ per hour.
SELECT date_bin(%(step)s, time, %(start)s) AS time, policy, avg(cost_rate) AS cost_rate, avg(apps_cost_rate) AS apps_cost_rate
FROM infaas.shadow_events
WHERE time >= %(start)s AND time < %(end)s AND policy <> 'oracle'
GROUP BY 1, 2
ORDER BY 1
