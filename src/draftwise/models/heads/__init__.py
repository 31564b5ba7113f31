"""Draft heads: small decoders that continue from the target's own hidden states."""
