"""Queues in a SQL database: PostgreSQL, MariaDB and SQLite."""
