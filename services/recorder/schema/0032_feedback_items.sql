-- The item of the query, from 0, that a label is for.
ALTER TABLE infaas.feedback ADD COLUMN item bigint NOT NULL DEFAULT 0;
