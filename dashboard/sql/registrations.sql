-- What became of registrations, the latest first.
SELECT registration, app, model, version, state, progress, reason, started, updated
FROM infaas.registrations ORDER BY started DESC LIMIT 50
