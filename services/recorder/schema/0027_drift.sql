-- Columns of queries, and of answers to them, that are distributed otherwise than in the validation set: a row when it was found, and one when it
-- has ended. cells: how many items of both fell into each cell, for a picture. No value of any query is here.
CREATE TABLE infaas_internal.drift_rows (
  time        timestamptz NOT NULL,
  app         text NOT NULL,
  model       text NOT NULL,
  column_name text NOT NULL,
  distance    double precision NOT NULL,
  since       timestamptz NOT NULL,
  ended       timestamptz,
  cells       text NOT NULL
);
CREATE INDEX drift_rows_app ON infaas_internal.drift_rows (app, since);
CREATE VIEW infaas.drift_events AS
SELECT min(time) AS time, app, column_name, max(distance) AS distance, since, max(ended) AS ended, model,
       (array_agg(cells ORDER BY time))[1] AS cells
FROM infaas_internal.drift_rows GROUP BY app, model, column_name, since;
