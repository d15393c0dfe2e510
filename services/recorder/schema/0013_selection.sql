-- What feedback taught about the members of apps whose models answer together: a row for each feedback and member.
CREATE TABLE infaas.selection_events (
  time        timestamptz NOT NULL,
  app         text NOT NULL,
  context     text,
  query       uuid NOT NULL,              -- uid of the prediction, as in query_outcomes
  member      text NOT NULL,              -- model
  probability double precision NOT NULL,  -- that the member had at the prediction
  loss        double precision NOT NULL,  -- 0: right, 1: wrong
  weight      double precision NOT NULL,  -- share of all weights after it
  reevaluated boolean NOT NULL            -- the prediction was made again for this feedback
);
ALTER TABLE infaas.feedback ADD COLUMN query uuid;  -- uid of the query, as its answer named it
CREATE INDEX selection_events_app_time ON infaas.selection_events (app, time DESC);
