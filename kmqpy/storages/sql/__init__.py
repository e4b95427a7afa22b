"""Queues in a SQL database: PostgreSQL, MariaDB, MySQL and SQLite."""
