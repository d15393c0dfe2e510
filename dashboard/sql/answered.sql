-- How many items of queries were answered, and how many were computed for queries and their parts, by the app that pays and variant;
-- offline work, too, which costs as well.
SELECT coalesce(payer, app) AS app, variant, coalesce(sum(items) FILTER (WHERE parent IS NULL), 0)::bigint AS items,
       coalesce(sum(items) FILTER (WHERE missing IS NULL), 0)::bigint AS computed
FROM infaas.query_outcomes
WHERE time >= %(start)s AND time < %(end)s AND outcome IN ('ok', 'late')
GROUP BY 1, 2
