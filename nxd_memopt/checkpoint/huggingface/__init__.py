"""Import from and export to Hugging Face directories, PEFT adapters and GGUF files."""
