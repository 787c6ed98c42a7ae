"""The plumbing under all packages: user errors, files, sections of a spec, memory, processes. No numerics."""
