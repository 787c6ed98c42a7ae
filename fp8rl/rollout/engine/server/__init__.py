"""The process of an SGLang server, what it is started with, and what is said to it."""
