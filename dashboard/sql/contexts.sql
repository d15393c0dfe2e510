-- The contexts of an app with most feedback; null: of the app as a whole.
SELECT context, count(*) AS rows
FROM infaas.selection_events
WHERE app = %(app)s AND time >= %(start)s AND time < %(end)s
GROUP BY context
ORDER BY rows DESC
LIMIT 20
