-- What differs from the validation set, and what did in the last week.
SELECT app, model, column_name, time, since, ended, distance, cells FROM infaas.drift_events
WHERE ended IS NULL OR ended > now() - interval '7 days' ORDER BY ended IS NOT NULL, distance DESC, column_name LIMIT 500
