-- Which members were not in an answer, by bucket: their part failed, or ended after it. A part arrives with its query.
SELECT date_bin(%(step)s, query.time, %(start)s) AS time, part.stage AS member, count(*) AS missing
FROM infaas.query_outcomes query JOIN infaas.query_outcomes part ON part.parent = query.uid
WHERE query.app = %(app)s AND query.time >= %(start)s AND query.time < %(end)s AND query.missing > 0 AND query.outcome <> 'cancelled'
  AND part.time >= %(start)s AND part.time < %(end)s
  AND (part.outcome NOT IN ('ok', 'late') OR part.latency_ms > query.latency_ms)
GROUP BY 1, 2
ORDER BY 1, 2
