-- What was deployed and scaled, and why; not which instances a plan keeps and which it can spare, as long as all of them stay.
SELECT time, 'scaling' AS kind, app, concat_ws(' ', replace(action, '_', ' '), coalesce(variant, worker)) || ': ' || reason AS what
FROM infaas.scaling_events
WHERE time >= %(start)s AND time < %(end)s AND count > 0 AND action NOT IN ('keep', 'release')
UNION ALL
SELECT time, CASE action WHEN 'deploy' THEN 'deployment' ELSE 'scaling' END, pipeline,
       vertex || ': ' || from_replicas || ' to ' || to_replicas || ' replicas: ' || reason
FROM infaas.pipeline_events
WHERE time >= %(start)s AND time < %(end)s
UNION ALL
SELECT updated, 'deployment', app, 'model ' || model || coalesce(' version ' || version, '') || ' was registered'
FROM infaas.registrations
WHERE updated >= %(start)s AND updated < %(end)s AND state = 'done'
ORDER BY time DESC
LIMIT 1000
