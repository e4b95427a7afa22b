"""The state of one owned partition, as the main loop keeps it. No I/O."""
