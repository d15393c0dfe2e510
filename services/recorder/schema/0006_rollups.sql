-- What stays when raw rows go: cost and queries by the hour for ever, objectives by the minute. Rows before a source's
-- watermark `upto` are in these stores, rows from there on are aggregated when somebody asks (rollups.sql); with TimescaleDB's
-- continuous aggregates (aggregates.sql) the stores only hold what was before them. floor: raw rows before it are gone or go.

CREATE TABLE infaas_internal.watermarks (
  source text PRIMARY KEY,
  upto   timestamptz NOT NULL DEFAULT '-infinity',
  floor  timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO infaas_internal.watermarks (source) VALUES ('query_outcomes'), ('cost_events');

-- For how long rows of a relation are kept; null: for ever. Written by `prepare` from store.keep_days.
CREATE TABLE infaas_internal.retention (
  relation text PRIMARY KEY,
  keep     interval
);

CREATE TABLE infaas_internal.cost_hours (
  hour         timestamptz NOT NULL,
  app          text,
  model        text,
  variant      text,
  hardware     text NOT NULL,
  simulated    boolean NOT NULL,
  cost         double precision NOT NULL,
  seconds      double precision NOT NULL,
  busy_seconds double precision NOT NULL
);
CREATE UNIQUE INDEX cost_hours_key ON infaas_internal.cost_hours (hour, app, model, variant, hardware, simulated) NULLS NOT DISTINCT;

CREATE TABLE infaas_internal.query_hours (
  hour     timestamptz NOT NULL,
  app      text NOT NULL,
  model    text,
  variant  text,
  hardware text,
  queries  bigint NOT NULL,
  items    bigint NOT NULL,
  charged  double precision NOT NULL
);
CREATE UNIQUE INDEX query_hours_key ON infaas_internal.query_hours (hour, app, model, variant, hardware) NULLS NOT DISTINCT;

-- stale: rows came late, the percentiles do not know of them yet.
CREATE TABLE infaas_internal.slo_minutes (
  minute  timestamptz NOT NULL,
  app     text NOT NULL,
  queries bigint NOT NULL,
  good    bigint NOT NULL,
  late    bigint NOT NULL,
  refused bigint NOT NULL,
  errors  bigint NOT NULL,
  p50_ms  double precision,
  p99_ms  double precision,
  stale   boolean NOT NULL DEFAULT false,
  PRIMARY KEY (minute, app)
);
CREATE INDEX slo_minutes_stale ON infaas_internal.slo_minutes (minute) WHERE stale;
