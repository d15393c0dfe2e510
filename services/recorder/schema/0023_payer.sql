-- payer: the app that pays, if it is another one (OutcomeEvent); null in older rows. The hours have both: `app` is whose instances are asked,
-- and costs are those of the payer.
ALTER TABLE infaas.query_outcomes ADD COLUMN payer text;

ALTER TABLE infaas_internal.query_hours ADD COLUMN payer text;
DROP INDEX infaas_internal.query_hours_key;
CREATE UNIQUE INDEX query_hours_key ON infaas_internal.query_hours (hour, app, payer, model, variant, hardware) NULLS NOT DISTINCT;
