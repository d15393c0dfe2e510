-- What is on NATS and must not be lost with its disk, for `infaas catalog restore`: each record, and the files of models, in parts.
CREATE TABLE infaas.catalog (
  bucket  text NOT NULL,
  key     text NOT NULL,
  body    bytea NOT NULL,
  digest  bytea NOT NULL,
  updated timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (bucket, key)
);

-- Files do not shrink. Of those that were deleted their room is used again within a minute.
CREATE TABLE infaas_internal.files (
  digest text NOT NULL,
  part   integer NOT NULL,
  body   bytea NOT NULL,
  PRIMARY KEY (digest, part)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1,
        toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 1);
ALTER TABLE infaas_internal.files ALTER COLUMN body SET STORAGE EXTERNAL;
