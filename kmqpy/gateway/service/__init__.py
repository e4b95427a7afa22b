"""What the gateway does with queues, whatever dialect asks: batches, names, ids, moves."""
