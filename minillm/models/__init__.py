"""Models: where they come from (hub), what they hold (weights), what they compute (transformer), their text."""
