"""What happens to messages, told to whoever counts or traces it."""
