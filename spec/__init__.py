"""The protocol of leases, redelivery, take-over and late acknowledgements in TLA+, and its runs."""
