-- functions: of the model's owner, before and after the model; null: there are none, or the recorder has not written the variant again.
ALTER TABLE infaas_internal.variants ADD COLUMN functions text;
