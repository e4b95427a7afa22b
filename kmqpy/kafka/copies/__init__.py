"""How every copy of a message is made: a redelivery, a dead letter, a redriven message."""
