"""How a token sees earlier ones: the protocol and its backends."""
