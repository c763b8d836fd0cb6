BEGIN TRANSACTION;
CREATE TABLE spent (caller TEXT, period TEXT, tokens INTEGER, PRIMARY KEY (caller, period));
INSERT INTO "spent" VALUES('ann','2096-10-02',1200);
INSERT INTO "spent" VALUES('ann','2096-10',1200);
COMMIT;
PRAGMA user_version = 0;
