"""A quarter of an hour of one GPU without a network: two scripts, and what they carry."""
