"""From files to named tensors and tokenizers."""
