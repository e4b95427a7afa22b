CREATE TABLE prefix_meta (name text PRIMARY KEY, value text NOT NULL) STRICT;
CREATE TABLE prefix_queues (
    id integer PRIMARY KEY, name text NOT NULL UNIQUE, settings text NOT NULL
) STRICT;
CREATE TABLE prefix_numbers (next integer NOT NULL) STRICT;
INSERT INTO prefix_numbers (next) VALUES (1);
CREATE TABLE prefix_messages (
    id integer PRIMARY KEY,
    queue integer NOT NULL,
    place integer NOT NULL,
    until_ms integer NOT NULL,
    since_ms integer NOT NULL,
    enqueued_ms integer NOT NULL,
    first_enqueued_ms integer NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state integer NOT NULL,
    minus_priority integer NOT NULL,
    reason text,
    message_key blob,
    headers blob,
    body blob NOT NULL,
    digest blob
) STRICT;
CREATE INDEX prefix_messages_ready ON prefix_messages (queue, minus_priority, place) WHERE state = 0;
CREATE INDEX prefix_messages_until ON prefix_messages (queue, state, until_ms) WHERE state <> 0;
CREATE INDEX prefix_messages_digest ON prefix_messages (digest, queue) WHERE digest IS NOT NULL;
INSERT INTO prefix_meta (name, value) VALUES ('schema_version', '2');
