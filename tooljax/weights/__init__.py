"""How updated weights reach the sidecars."""
