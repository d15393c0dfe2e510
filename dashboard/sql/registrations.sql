-- What became of registrations, the latest first, without those that failed and were dismissed.
SELECT registration, app, model, version, state, progress, reason, started, updated
FROM infaas.registrations WHERE state <> 'dismissed' ORDER BY started DESC LIMIT 50
