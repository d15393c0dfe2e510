-- When the query came that a label is about: the label may come days later.
ALTER TABLE infaas.feedback ADD COLUMN asked timestamptz;
