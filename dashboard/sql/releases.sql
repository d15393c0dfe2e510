-- The states of each app's releases of the last 90 days, oldest first.
SELECT time, app, release, model, old_version, version, share, state, reason FROM infaas.release_events
WHERE time > now() - interval '90 days' ORDER BY time LIMIT 2000
