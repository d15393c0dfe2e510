-- How far the models that answered together agreed, and how many were missing, by bucket.
SELECT date_bin(%(step)s, time, %(start)s) AS time, count(*) AS queries, avg(confidence) AS confidence,
       count(*) FILTER (WHERE missing > 0) AS incomplete, count(*) FILTER (WHERE outcome = 'default') AS defaults
FROM infaas.query_outcomes
WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s AND missing IS NOT NULL AND outcome <> 'cancelled'
GROUP BY 1
ORDER BY 1
