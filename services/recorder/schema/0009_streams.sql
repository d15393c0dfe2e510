-- Which streams and buckets this system has on NATS, so that their loss is noticed (services/shell/runtime/known_streams.py).
CREATE TABLE infaas_internal.streams (
    name text PRIMARY KEY,
    created text NOT NULL,  -- as NATS says it
    noted timestamptz NOT NULL DEFAULT now()
);
