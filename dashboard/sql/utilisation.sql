-- How busy and how full devices were, by bucket.
SELECT date_bin(%(step)s, time, %(start)s) AS time, worker, device, hardware,
       avg(utilisation) AS utilisation, avg(memory_used_mb / nullif(memory_mb, 0)) AS memory, avg(load) AS load, max(queue) AS queue
FROM infaas.worker_samples
WHERE time >= %(start)s AND time < %(end)s
GROUP BY 1, 2, 3, 4
ORDER BY 1
