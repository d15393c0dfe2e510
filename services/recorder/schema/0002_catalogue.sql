-- What there is: a mirror of the catalogue bucket, and what runs now. The recorder overwrites these rows; the bucket is
-- the authority. Shown to users through views, since one variant serves every app that its model is linked to.

CREATE TABLE infaas_internal.apps (
  app            text PRIMARY KEY,
  latency_ms     double precision,
  min_instances  integer NOT NULL,
  default_output jsonb,
  inputs         jsonb,
  outputs        jsonb,
  created        timestamptz NOT NULL
);

CREATE TABLE infaas_internal.app_models (
  app     text NOT NULL,
  model   text NOT NULL,
  version text NOT NULL,
  PRIMARY KEY (app, model)
);

CREATE TABLE infaas_internal.models (
  model        text NOT NULL,
  version      text NOT NULL,
  task         text,
  metric       text NOT NULL,
  format       text NOT NULL,
  inputs       jsonb NOT NULL,
  outputs      jsonb NOT NULL,
  registration text NOT NULL,
  created      timestamptz NOT NULL,
  PRIMARY KEY (model, version)
);

CREATE TABLE infaas_internal.variants (
  variant        text PRIMARY KEY,
  model          text NOT NULL,
  version        text NOT NULL,
  hardware       text NOT NULL,
  framework      text NOT NULL,
  precision      text NOT NULL,
  threads        integer NOT NULL,
  max_batch      integer NOT NULL,
  accuracy       double precision,
  agreement      double precision,
  load_ms        double precision NOT NULL,
  latency_ms     double precision,
  memory_mb      double precision NOT NULL,
  saturation_qps double precision NOT NULL,
  price_per_hour double precision,
  cost_per_1000  double precision,
  batching       text NOT NULL,
  provenance     text NOT NULL,
  dominated      boolean NOT NULL,
  simulated      boolean NOT NULL,
  attributes     jsonb NOT NULL,
  since          timestamptz NOT NULL DEFAULT now()
);

-- One measured cell of a variant's profile; length: bucket of the varying axis, null when lengths are fixed.
CREATE TABLE infaas.profiles (
  model         text NOT NULL,
  version       text NOT NULL,
  variant       text NOT NULL,
  hardware      text NOT NULL,
  batch         integer NOT NULL,
  length        integer,
  p50_ms        double precision NOT NULL,
  p99_ms        double precision NOT NULL,
  cpu_ms        double precision NOT NULL,
  wall_over_cpu double precision NOT NULL,
  provenance    text NOT NULL,
  disturbed     boolean NOT NULL
);
CREATE INDEX profiles_variant ON infaas.profiles (variant);

-- US$ an hour of one unit of a device kind: of a core where cores are sold, else of a whole device.
CREATE TABLE infaas.prices (
  hardware       text PRIMARY KEY,
  price_per_hour double precision NOT NULL,
  unit           text NOT NULL CHECK (unit IN ('core', 'device'))
);

-- Work: the last known status of each registration and each offline job.
CREATE TABLE infaas.registrations (
  registration text PRIMARY KEY,
  app          text NOT NULL,
  model        text NOT NULL,
  version      text,
  state        text NOT NULL,
  progress     double precision NOT NULL,
  reason       text,
  started      timestamptz NOT NULL,
  updated      timestamptz NOT NULL
);

CREATE TABLE infaas.jobs (
  job      text PRIMARY KEY,
  app      text NOT NULL,
  model    text,
  variant  text,
  state    text NOT NULL,
  input    text NOT NULL,
  output   text NOT NULL,
  accuracy double precision,
  total    bigint,
  done     bigint NOT NULL DEFAULT 0,
  reason   text,
  created  timestamptz NOT NULL,
  updated  timestamptz NOT NULL
);

-- The last known state of every instance, folded from state events as they are written. app '': of the instance as such;
-- else of the instance as this app sees it. Ended ones (Inactive) stay for a while: they say since when.
CREATE TABLE infaas_internal.instances (
  instance text NOT NULL,
  app      text NOT NULL,
  model    text NOT NULL,
  variant  text NOT NULL,
  worker   text NOT NULL,
  device   text NOT NULL,
  state    text NOT NULL,
  since    timestamptz NOT NULL,
  PRIMARY KEY (instance, app)
);

-- The last known state of every worker, when its present monitor started, and when it last sent a sample.
CREATE TABLE infaas_internal.workers (
  worker   text PRIMARY KEY,
  hardware text NOT NULL,
  state    text,
  since    timestamptz,
  started  timestamptz,
  seen     timestamptz
);
