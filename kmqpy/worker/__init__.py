"""Workers: call a handler for each message of a queue of any storage, in threads or on asyncio."""
