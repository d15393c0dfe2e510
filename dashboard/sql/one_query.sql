-- One query, then its parts in the order in which they began.
SELECT time, uid::text AS query, id, app, stage, model, version, variant, worker, hardware, outcome, code, latency_ms, slo_ms, accuracy,
       accuracy_required, cost, cost_limit, priority, items, batch, cached, simulated, policy, context, confidence, missing, parent IS NOT NULL AS part
FROM infaas.query_outcomes
WHERE uid = %(uid)s::uuid OR parent = %(uid)s::uuid
ORDER BY part, time, stage
LIMIT 500
