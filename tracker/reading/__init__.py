"""Reading the markers of owned partitions, as far as the messages exist that they name."""
