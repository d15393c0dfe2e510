-- Whether there is anything to show at all.
SELECT (SELECT count(*) FROM infaas.apps) AS apps, (SELECT max(time) FROM infaas.worker_samples) AS last_sample
