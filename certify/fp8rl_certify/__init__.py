"""The certificate of an engine: of a running server (`server`, without torch), or of what it has said (`dump`)."""
