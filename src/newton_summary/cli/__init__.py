"""The command ``newton-summary``."""
