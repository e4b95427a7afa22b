"""The state that the main loop keeps of each owned partition. No I/O."""
