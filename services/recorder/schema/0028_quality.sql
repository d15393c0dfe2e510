-- What a label says of the answer that it is about. Null: it does not count (it came again), nobody knows the answer, or it is no matter of
-- right and wrong.
ALTER TABLE infaas.feedback ADD COLUMN variant text;             -- null: several models answered together
ALTER TABLE infaas.feedback ADD COLUMN score double precision;
ALTER TABLE infaas.feedback ADD COLUMN promised double precision;
