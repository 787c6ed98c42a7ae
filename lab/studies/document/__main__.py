"""`python -m lab.studies.document` writes docs/studies.md anew, from what is kept."""

from lab.studies.document.document import write_docs

write_docs()
