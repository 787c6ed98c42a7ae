"""What every study works with: claims, statistics, a live trainer, pages, and what is kept."""
