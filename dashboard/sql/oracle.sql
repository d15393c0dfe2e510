-- What the last day that has been compared could have cost at best, and how what was paid compares, in words.
SELECT time AS day, reason FROM infaas.shadow_events WHERE policy = 'oracle' ORDER BY time DESC LIMIT 1
