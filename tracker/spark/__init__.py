"""The tracker as a job on Spark."""
