-- Offline jobs, the latest first.
SELECT job, app, model, variant, state, input, output, accuracy, total, done, failed, reason, cost, created, started, finished, updated
FROM infaas.jobs
WHERE state NOT IN ('done', 'failed', 'cancelled') OR updated >= %(start)s
ORDER BY created DESC LIMIT 200
