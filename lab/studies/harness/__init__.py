"""The tools of every study: claims, statistics, a live trainer, pages, and what is kept."""
