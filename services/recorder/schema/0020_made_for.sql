-- A version remembers for which app it was registered; null: for none, or before this was recorded.
ALTER TABLE infaas_internal.models ADD COLUMN app text;
CREATE OR REPLACE VIEW infaas.models AS
SELECT m.model, m.version,
       ARRAY(SELECT l.app FROM infaas_internal.app_models l WHERE l.model = m.model ORDER BY 1) AS apps,
       ARRAY(SELECT l.app FROM infaas_internal.app_models l WHERE l.model = m.model AND l.version = m.version ORDER BY 1) AS serving,
       m.task, m.metric, m.format,
       (SELECT count(*) FROM infaas_internal.variants v WHERE v.model = m.model AND v.version = m.version) AS variants,
       m.created, m.inputs, m.outputs, m.registration, m.app
FROM infaas_internal.models m;
