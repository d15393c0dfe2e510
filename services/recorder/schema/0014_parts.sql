-- Queries that several models answer together: each has a row of its own, and one for each of its parts, with `parent` and `stage`.
-- What counts queries counts rows without a parent. Null in rows of queries that one variant answered, and in rows of parts.
ALTER TABLE infaas.query_outcomes
  ADD COLUMN confidence double precision,  -- share of the asked members that agree with the answer, 0..1
  ADD COLUMN missing    bigint;            -- how many of the asked members are not in the answer
CREATE INDEX query_outcomes_parent ON infaas.query_outcomes (parent, time) WHERE parent IS NOT NULL;

-- queries, items, charged: without parts. asked: parts, and queries without parts; asked_items: of these, less what a cache answered.
ALTER TABLE infaas_internal.query_hours
  ADD COLUMN asked       bigint NOT NULL DEFAULT 0,
  ADD COLUMN asked_items bigint NOT NULL DEFAULT 0;
UPDATE infaas_internal.query_hours SET asked = queries, asked_items = items;
