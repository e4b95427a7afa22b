"""Handler functions over any queue: threads, leases, order by key, asyncio."""
