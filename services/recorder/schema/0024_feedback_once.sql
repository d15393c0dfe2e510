-- uid: the feedback's own. One that is recorded again after a crash is one row: the recorder asks for the uid before it writes, as of outcomes
-- (0001_events.sql). Null: of before.
ALTER TABLE infaas.feedback ADD COLUMN uid uuid;
CREATE INDEX feedback_uid ON infaas.feedback (uid);
