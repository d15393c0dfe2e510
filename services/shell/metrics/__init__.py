"""What a process shows to those who operate it: /metrics for Prometheus, /healthz and /readyz (docs/metrics.md)."""
