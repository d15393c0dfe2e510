-- What was measured of one variant at its registration, by batch size; length: of the inputs, where they vary.
SELECT batch, length, p50_ms, p99_ms, cpu_ms, provenance
FROM infaas.profiles
WHERE variant = %(variant)s
ORDER BY length NULLS FIRST, batch
