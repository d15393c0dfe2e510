-- What became of releases: a row for each state and step. There are few, and they are kept for ever.
CREATE TABLE infaas.release_events (
  time        timestamptz NOT NULL,
  release     text NOT NULL,
  app         text NOT NULL,
  model       text NOT NULL,
  version     text NOT NULL,
  old_version text NOT NULL,
  share       double precision NOT NULL,
  state       text NOT NULL,
  reason      text NOT NULL
);
CREATE INDEX release_events_time ON infaas.release_events (time DESC);
