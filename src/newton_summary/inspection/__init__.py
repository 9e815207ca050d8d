"""A model of the user's own, measured for the page: ``newton-summary inspect``."""
