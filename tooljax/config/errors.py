"""What every wrong setting raises."""


class ConfigError(ValueError):
    """A setting is wrong. Says where it was set, its value, and what would be right; one line a problem."""
