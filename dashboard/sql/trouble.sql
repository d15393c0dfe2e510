-- What went wrong that nobody may have noticed.
SELECT (SELECT count(*) FROM infaas.rejected_events) AS rejected,
       (SELECT count(*) FROM infaas.jobs WHERE state = 'failed' AND updated > now() - interval '1 day') AS failed_jobs,
       (SELECT count(*) FROM infaas.registrations WHERE state = 'failed' AND updated > now() - interval '1 day') AS failed_registrations,
       (SELECT count(*) FROM infaas.apps) AS apps,
       (SELECT max(time) FROM infaas.worker_samples) AS last_sample
