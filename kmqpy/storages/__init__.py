"""The storages behind the Queue protocol; `kmqpy.queue.queue_for` opens them."""
