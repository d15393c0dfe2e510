-- Visits to the vertices of a pipeline, by bucket.
SELECT date_bin(%(step)s, part.time, %(start)s) AS time, part.stage AS vertex, count(*) AS visits
FROM infaas.query_outcomes query JOIN infaas.query_outcomes part ON part.parent = query.uid
WHERE query.app = %(app)s AND query.time >= %(start)s AND query.time < %(end)s
  AND part.time >= %(start)s AND part.time < %(end)s
GROUP BY 1, 2
ORDER BY 1, 2
