"""The protocol of leases, redelivery, take-over and late acknowledgements in TLA+, and the runs that check it."""
