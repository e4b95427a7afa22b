CREATE TABLE prefix_meta (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE prefix_queues (
    id bigint PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE, settings text NOT NULL
);
CREATE SEQUENCE prefix_numbers;
CREATE TABLE prefix_messages (
    id bigint PRIMARY KEY,
    queue bigint NOT NULL,
    place bigint NOT NULL,
    until_ms bigint NOT NULL,
    since_ms bigint NOT NULL,
    enqueued_ms bigint NOT NULL,
    first_enqueued_ms bigint NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state smallint NOT NULL,
    minus_priority smallint NOT NULL,
    reason text,
    message_key bytea,
    headers bytea,
    body bytea NOT NULL,
    digest bytea
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000
);
CREATE INDEX prefix_messages_ready ON prefix_messages (queue, minus_priority, place) WHERE state = 0;
CREATE INDEX prefix_messages_until ON prefix_messages (queue, state, until_ms, id) WHERE state > 0;
CREATE INDEX prefix_messages_digest ON prefix_messages (digest, queue) WHERE digest IS NOT NULL;
INSERT INTO prefix_meta (name, value) VALUES ('schema_version', '2');
