-- Queries that were answered without all of their members are few: the page Members finds those of a month without reading the others.
CREATE INDEX query_outcomes_missing ON infaas.query_outcomes (app, time) WHERE missing > 0;
