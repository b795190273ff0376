"""Tools: verl's contract, its tool_config files, and the built-in tools."""
