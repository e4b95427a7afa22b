"""What the doctor checks, one file per subject. Pure: no I/O."""
