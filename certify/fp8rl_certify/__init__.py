"""The certificate of an engine, from a running server (`server`, without torch) or from a dump of answers (`dump`)."""
