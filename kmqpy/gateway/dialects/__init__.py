"""The interfaces of other queue services, one file each."""
