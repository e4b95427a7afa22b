"""Every copy of a message: a redelivery, a dead letter, a dead letter's way back into its queue."""
