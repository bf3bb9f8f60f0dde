"""From documents to token ids and labels."""
