"""`python -m lab.studies.document` writes lab/docs/studies.md again, from what is kept."""

from lab.studies.document.document import write_docs

write_docs()
