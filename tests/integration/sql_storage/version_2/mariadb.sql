CREATE TABLE IF NOT EXISTS prefix_queues (
    id bigint PRIMARY KEY,
    name varchar(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL UNIQUE,
    settings mediumtext CHARACTER SET utf8mb4 NOT NULL
) ENGINE = InnoDB COMMENT = 'kmqpy';
CREATE SEQUENCE IF NOT EXISTS prefix_numbers ENGINE = InnoDB COMMENT = 'kmqpy';
CREATE TABLE IF NOT EXISTS prefix_messages (
    id bigint PRIMARY KEY,
    queue bigint NOT NULL,
    place bigint NOT NULL,
    until_ms bigint NOT NULL,
    since_ms bigint NOT NULL,
    enqueued_ms bigint NOT NULL,
    first_enqueued_ms bigint NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state tinyint NOT NULL,
    minus_priority tinyint NOT NULL,
    reason mediumtext CHARACTER SET utf8mb4,
    message_key longblob,
    headers longblob,
    body longblob NOT NULL,
    digest binary(16),
    INDEX prefix_messages_ready (queue, state, minus_priority, place),
    INDEX prefix_messages_until (queue, state, until_ms),
    INDEX prefix_messages_digest (digest, queue)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = 'kmqpy';
CREATE TABLE IF NOT EXISTS prefix_meta (
    name varchar(100) CHARACTER SET ascii PRIMARY KEY, value varchar(100) CHARACTER SET ascii NOT NULL
) ENGINE = InnoDB COMMENT = 'kmqpy';
INSERT INTO prefix_meta (name, value) VALUES ('schema_version', '2');
