-- The models, in all versions.
SELECT model, version, apps, serving, task, metric, format, variants, created FROM infaas.models ORDER BY model, version
