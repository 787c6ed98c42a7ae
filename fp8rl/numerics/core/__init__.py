"""The plumbing under all packages: errors of the user, files, sections of a spec, memory, processes. No numerics."""
