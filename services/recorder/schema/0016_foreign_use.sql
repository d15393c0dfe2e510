-- The part of a device's utilisation that processes used which are no executors of its worker.
ALTER TABLE infaas.worker_samples ADD COLUMN foreign_use double precision NOT NULL DEFAULT 0;
