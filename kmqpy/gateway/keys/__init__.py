"""Who may do what: API keys, permissions and limits per key."""
