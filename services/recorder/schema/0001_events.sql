-- What happened: one table per kind of event, appended to by the recorder and never changed.
--
-- Plain tables here; TimescaleDB turns those with a `time` column into hypertables without any change of name or column.
-- So every unique key of theirs contains `time`, no foreign key points to them, and none of them is partitioned by hand.

CREATE TABLE infaas.state_events (
  time       timestamptz NOT NULL,
  app        text,
  model      text NOT NULL,
  variant    text NOT NULL,
  worker     text NOT NULL,
  device     text NOT NULL,
  from_state text NOT NULL,
  to_state   text NOT NULL,
  reason     text NOT NULL,
  instance   text NOT NULL
);
CREATE INDEX state_events_time ON infaas.state_events (time DESC);

CREATE TABLE infaas.query_outcomes (
  time              timestamptz NOT NULL,
  uid               uuid NOT NULL,
  id                text,
  app               text NOT NULL,
  model             text,
  variant           text,
  worker            text,
  hardware          text,
  outcome           text NOT NULL,
  code              text,
  latency_ms        double precision,
  slo_ms            double precision,
  accuracy          double precision,
  accuracy_required double precision,
  cost_limit        double precision,
  priority          bigint,
  items             bigint NOT NULL,
  batch             bigint,
  cached            boolean NOT NULL,
  simulated         boolean NOT NULL,
  cost              double precision NOT NULL,
  version           text,
  policy            text,
  context           text,
  input_digest      text,
  parent            uuid,
  stage             text
);
CREATE INDEX query_outcomes_time ON infaas.query_outcomes (time DESC);
-- Lets `WHERE minute > ...` and `WHERE hour > ...` on the views below read only the rows concerned. BRIN: next to free.
CREATE INDEX query_outcomes_buckets ON infaas.query_outcomes USING brin (
  date_bin('1 minute', time, '2000-01-03 00:00:00+00'), date_bin('1 hour', time, '2000-01-03 00:00:00+00')
) WITH (pages_per_range = 32, autosummarize = on);

-- One outcome a uid. A retry of the same query may be recorded by two dispatchers with two arrival times, so the unique
-- key that a hypertable allows, (uid, time), is not enough. The recorder therefore asks known_uids() before it writes,
-- and serialises that with the writing by locking outcome_lock (a table of its own: readers and vacuum never wait for
-- it). The index below answers the question by its first column, stops an exact repeat whatever the recorder does, and
-- serves whoever looks for one query. Server CPU a row, measured: so 4.2 us; with a second table of recent uids 5.6, and
-- that table must be cleaned up; with a staging table and ON CONFLICT 6.8, and that only knows exact repeats.
-- On a hypertable the function's body gets `AND time > earliest - interval '1 hour'`, so that only young chunks are
-- searched; the recorder already passes the earliest arrival of what it is about to write.
CREATE UNIQUE INDEX query_outcomes_uid ON infaas.query_outcomes (uid, time);
CREATE TABLE infaas_internal.outcome_lock ();
CREATE FUNCTION infaas_internal.known_uids(uids uuid[], earliest timestamptz) RETURNS SETOF uuid
LANGUAGE sql STABLE AS $$ SELECT uid FROM infaas.query_outcomes WHERE uid = ANY (uids) $$;

CREATE TABLE infaas.cost_events (
  time         timestamptz NOT NULL,
  seconds      double precision NOT NULL,
  worker       text NOT NULL,
  hardware     text NOT NULL,
  app          text,
  model        text,
  variant      text,
  busy_seconds double precision NOT NULL,
  cost         double precision NOT NULL
);
CREATE INDEX cost_events_time ON infaas.cost_events (time DESC);

CREATE TABLE infaas.scaling_events (
  time      timestamptz NOT NULL,
  scaler    text NOT NULL,
  worker    text,
  app       text,
  model     text,
  variant   text,
  action    text NOT NULL,
  count     bigint NOT NULL,
  reason    text NOT NULL,
  solver    text,
  solve_ms  double precision,
  objective double precision
);
CREATE INDEX scaling_events_time ON infaas.scaling_events (time DESC);

CREATE TABLE infaas.worker_events (
  time       timestamptz NOT NULL,
  worker     text NOT NULL,
  hardware   text NOT NULL,
  from_state text NOT NULL,
  to_state   text NOT NULL,
  reason     text NOT NULL
);
CREATE INDEX worker_events_time ON infaas.worker_events (time DESC);

CREATE TABLE infaas.worker_samples (
  time           timestamptz NOT NULL,
  worker         text NOT NULL,
  device         text NOT NULL,
  hardware       text NOT NULL,
  utilisation    double precision NOT NULL,
  memory_mb      double precision NOT NULL,
  memory_used_mb double precision NOT NULL,
  load           double precision NOT NULL,
  queue          bigint NOT NULL
);
CREATE INDEX worker_samples_time ON infaas.worker_samples (time DESC);

CREATE TABLE infaas.instance_samples (
  time        timestamptz NOT NULL,
  worker      text NOT NULL,
  device      text NOT NULL,
  app         text,
  model       text NOT NULL,
  variant     text NOT NULL,
  instance    text NOT NULL,
  utilisation double precision NOT NULL,
  memory_mb   double precision NOT NULL,
  load        double precision NOT NULL,
  queue       bigint NOT NULL,
  latency_ms  double precision NOT NULL,
  mean_batch  double precision NOT NULL
);
CREATE INDEX instance_samples_time ON infaas.instance_samples (time DESC);

-- Every batch of events ever written, for as long as it could be delivered again: the id is registered in the same
-- transaction as the rows, so that a row is unique by (batch id, row number) without a word about it in each row.
CREATE TABLE infaas_internal.batches (
  id       text PRIMARY KEY,
  recorded timestamptz NOT NULL DEFAULT now()
);

-- What could not be read or written, kept with its bytes and the reason; digest: SHA-256 of subject and body.
CREATE TABLE infaas_internal.rejected (
  digest  bytea PRIMARY KEY,
  time    timestamptz NOT NULL DEFAULT now(),
  subject text NOT NULL,
  reason  text NOT NULL,
  body    bytea NOT NULL
);
CREATE VIEW infaas.rejected_events AS
SELECT time, subject, reason, length(body) AS bytes FROM infaas_internal.rejected;
