"""`python -m studies.document` writes docs/studies.md anew, from what is kept."""

from studies.document.document import write_docs

write_docs()
