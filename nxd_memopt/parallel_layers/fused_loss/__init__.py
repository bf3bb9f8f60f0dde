"""Language-model head fused with its cross entropy, without the logits of all tokens in memory."""
