"""Images of rows: files, placeholders in the prompt, pixels, and the vision tower (`--vision`)."""
