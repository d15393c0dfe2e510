-- Whether nobody needed the instance then: it serves until its place is needed, and its share is booked as idle.
ALTER TABLE infaas.instance_samples ADD COLUMN reclaimable boolean NOT NULL DEFAULT false;
