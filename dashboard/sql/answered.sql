-- How many items of queries were answered, and how many were computed for queries and their parts, by the app that pays and variant;
-- offline work, too, which costs as well.
SELECT coalesce(payer, app) AS app, variant, coalesce(sum(items) FILTER (WHERE NOT part), 0)::bigint AS items,
       coalesce(sum(items) FILTER (WHERE NOT together), 0)::bigint AS computed
FROM infaas.outcomes_between(%(start)s, %(end)s)
WHERE outcome IN ('ok', 'late')
GROUP BY 1, 2
