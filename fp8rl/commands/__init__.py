"""The commands of `fp8rl`. A module here is light to import; each command imports what it needs when it is called."""
