"""Problems worked in a shell and scored by the files that are there afterwards."""
