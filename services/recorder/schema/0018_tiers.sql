-- The parts of a variant's load time, and what it takes of host memory while it is Warm. Null: its backend cannot keep it there.
ALTER TABLE infaas_internal.variants
  ADD COLUMN init_ms double precision, ADD COLUMN transfer_ms double precision, ADD COLUMN host_mb double precision;
-- Host memory that a device's Warm instances took then.
ALTER TABLE infaas.worker_samples ADD COLUMN host_used_mb double precision NOT NULL DEFAULT 0;
