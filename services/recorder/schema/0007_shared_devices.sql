-- Of which variants price_per_hour and cost_per_1000 are those of a whole device, of which an instance takes the share of its memory.
ALTER TABLE infaas_internal.variants ADD COLUMN shared boolean NOT NULL DEFAULT false;
