"""Makes the copies with which a tracker redelivers messages, or dead-letters them. Also writes ticks.

A copy is a new record of the message. A tick is a marker that only brings the broker's time.
"""
