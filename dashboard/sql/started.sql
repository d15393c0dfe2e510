-- Why each variant that is loaded was last started.
SELECT v.variant, s.time, s.scaler, s.action, s.reason
FROM (SELECT DISTINCT variant FROM infaas.variant_states WHERE worker IS NOT NULL) v
CROSS JOIN LATERAL (
  SELECT time, scaler, action, reason FROM infaas.scaling_events e
  WHERE e.variant = v.variant AND action IN ('load', 'replicate', 'upgrade', 'downgrade', 'migrate')
  ORDER BY time DESC LIMIT 1
) s
