-- What simulated devices are said to cost is nobody's money: it can be told apart from the real bill.
ALTER TABLE infaas.cost_events ADD COLUMN simulated boolean NOT NULL DEFAULT false;
