"""The checks of the doctor, one file per subject. Pure: no I/O."""
