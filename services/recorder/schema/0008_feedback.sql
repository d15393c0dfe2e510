-- What answers should have been. Kept until somebody deletes it: it is little, and what policies may learn from.
CREATE TABLE infaas.feedback (
  time         timestamptz NOT NULL,
  app          text NOT NULL,
  id           text,  -- of the query, as its sender named it
  context      text,
  label        text NOT NULL,  -- JSON
  input_digest text   -- BLAKE2b (16 bytes, hexadecimal) of the inputs, where they came along
);
CREATE INDEX feedback_app_time ON infaas.feedback (app, time DESC);
