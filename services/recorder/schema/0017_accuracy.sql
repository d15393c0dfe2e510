-- The 95 % confidence interval of a variant's accuracy. Null until the recorder has written the variant again, or if it was not measured.
ALTER TABLE infaas_internal.variants ADD COLUMN accuracy_low double precision, ADD COLUMN accuracy_high double precision;
