"""Problems with their reference answers, from files."""
