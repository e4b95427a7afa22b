"""Commands of `manage.py`, as Django finds them."""
