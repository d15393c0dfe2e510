-- model_accuracy: of the model as it was uploaded; alone: why this variant computes each item alone. Null until the recorder has written
-- the variant again, or where it is not known, or items are computed together.
ALTER TABLE infaas_internal.variants ADD COLUMN model_accuracy double precision, ADD COLUMN alone text;

-- accuracy: what a query gets that states none; the next file shows it in the view of apps.
ALTER TABLE infaas_internal.apps ADD COLUMN accuracy text NOT NULL DEFAULT 'own';
