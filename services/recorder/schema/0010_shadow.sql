-- What policies that run beside the system without acting would have done (`infaas shadow`). cost_rate: US$ per hour of the policy's
-- machines after the action; apps_cost_rate: the part of it for loaded instances. Rows with action `sample` only tell the cost.
CREATE TABLE infaas.shadow_events (
  time           timestamptz NOT NULL,
  policy         text NOT NULL,
  scaler         text NOT NULL,
  worker         text,
  app            text,
  variant        text,
  action         text NOT NULL,
  count          bigint NOT NULL,
  reason         text NOT NULL,
  cost_rate      double precision NOT NULL,
  apps_cost_rate double precision NOT NULL
);
CREATE INDEX shadow_events_time ON infaas.shadow_events (time DESC);
