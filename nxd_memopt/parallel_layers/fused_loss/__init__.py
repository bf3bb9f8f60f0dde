"""The language-model head and its cross entropy in one, without logits of all tokens."""
