"""One SGLang server: its arguments, its process, its client, and the handshake."""
