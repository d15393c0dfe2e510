-- differing: the outputs of a variant that are not scored and differ from its model's, with the share of answers that agree. metric: what
-- accuracy stands for, and measured: its value. Null until the recorder has written the variant again.
ALTER TABLE infaas_internal.variants
  ADD COLUMN differing jsonb NOT NULL DEFAULT '{}', ADD COLUMN metric text, ADD COLUMN measured double precision;
