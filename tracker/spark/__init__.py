"""Runs trackers as long tasks of a Spark job: Spark places them on machines, and replaces those that die."""
